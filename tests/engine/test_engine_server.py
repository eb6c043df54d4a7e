"""The engine's server, as the real `openai` client and plain HTTP see it."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from agentlightning.engine import model as model_module  # noqa: E402
from agentlightning.engine import server as server_module  # noqa: E402
from agentlightning.engine.scheduler import Choice  # noqa: E402
from agentlightning.engine.tiny import tokenizer  # noqa: E402
from agentlightning.engine.tiny.codec import TinyChatCodec  # noqa: E402
from agentlightning.engine.tiny.model import TinyModel, TinyShape  # noqa: E402
from agentlightning.errors import ConfigurationError  # noqa: E402
from tests.engine.scripted import (  # noqa: E402
    PATIENCE_SECONDS,
    ScriptedModel,
    Served,
    calling,
    saying,
    serving,
    until,
)

pytestmark = pytest.mark.usefixtures("one_thread")
HELLO: Any = [{"role": "user", "content": "37+58?"}]
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
NAMED: Any = {"type": "function", "function": {"name": "calculator"}}

both_ways = pytest.mark.parametrize("served", ["in the loop", "in a thread"], indirect=True)


@pytest.fixture
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A scripted model whose engine runs in the server's loop, or in a thread of its own."""
    if getattr(request, "param", None) == "in a thread":
        monkeypatch.setattr(model_module, "SMALL_MODEL_PARAMETERS", 0)
    with serving(ScriptedModel(saying("95"))) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
        yield client


def raw(served: Served, route: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(served.url + route, json=body, timeout=PATIENCE_SECONDS)


# ---------------------------------------------------------------------- answers


def test_tokens_of_a_chat_are_counted_without_an_answer(served: Served, client: openai.OpenAI) -> None:
    counted = raw(served, "/tokenize", messages=HELLO, tools=[CALCULATOR])
    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=[CALCULATOR])

    assert answer.usage is not None
    assert counted.json()["count"] == len(counted.json()["tokens"]) == answer.usage.prompt_tokens
    assert raw(served, "/tokenize", messages="no").status_code == 400


@both_ways
def test_an_answer_has_text_tokens_logprobs_and_the_version_of_the_weights(
    served: Served, client: openai.OpenAI
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
    )

    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "95", "stop")
    fields = answer.model_dump()
    assert fields["prompt_token_ids"] == TinyChatCodec().render(HELLO)
    assert fields["choices"][0]["token_ids"] == saying("95")
    assert fields["weights_version"] == 0
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["9", "5", "<end>"]
    assert choice.logprobs.content[0].logprob == pytest.approx(0, abs=1e-6)
    assert choice.logprobs.content[0].bytes == list(b"9")
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2, 2, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(fields["prompt_token_ids"]), 3)


def test_a_plain_answer_has_no_more_than_was_asked_for_and_neutral_values_are_fine(served: Served) -> None:
    neutral: Any = {"presence_penalty": 0, "response_format": {"type": "text"}, "logit_bias": None}
    answer = raw(served, model="tiny", messages=HELLO, **neutral).json()

    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


def test_a_tool_call_is_answered_as_openai_does_and_the_next_turn_repeats_its_tokens(
    served: Served, client: openai.OpenAI
) -> None:
    served.model.script = calling("37+58")
    extra = {"return_token_ids": True}
    first = client.chat.completions.create(model="tiny", messages=HELLO, tools=[CALCULATOR], extra_body=extra)

    [choice] = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("calculator", {"expression": "37+58"})  # type: ignore[union-attr]

    served.model.script = saying("95")
    history = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "95"}]
    second = client.chat.completions.create(model="tiny", messages=history, tools=[CALCULATOR], extra_body=extra)
    told, sampled = first.model_dump()["prompt_token_ids"], first.model_dump()["choices"][0]["token_ids"]
    assert second.model_dump()["prompt_token_ids"][: len(told) + len(sampled)] == told + sampled
    assert second.choices[0].message.content == "95"


def test_tool_choice_none_gives_the_model_no_tool(served: Served, client: openai.OpenAI) -> None:
    served.model.script = calling("1")

    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=[CALCULATOR], tool_choice="none")

    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


@both_ways
def test_text_is_cut_before_a_stop_string_and_the_tokens_are_kept(served: Served, client: openai.OpenAI) -> None:
    served.model.script = saying("one two three four")

    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, stop=["xyz", "two t"], extra_body={"return_token_ids": True}
    )

    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_dump()["choices"][0]["token_ids"] == tokenizer.encode("one two t")


def test_completions_take_text_and_ids_and_several_of_them(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["ab", "c"], n=2, logprobs=1, extra_body={"return_token_ids": True}
    )
    of_ids = client.completions.create(model="tiny", prompt=[20, 21], max_tokens=1)

    assert [choice.text for choice in answer.choices] == ["95"] * 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["9", "5", "<end>"]
    assert answer.model_dump()["choices"][2]["prompt_token_ids"] == tokenizer.encode("c")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert (of_ids.choices[0].text, of_ids.choices[0].finish_reason) == ("9", "length")


# ---------------------------------------------------------------------- streams


@both_ways
def test_a_stream_begins_with_the_role_and_adds_up_to_the_answer(served: Served, client: openai.OpenAI) -> None:
    served.model.script = saying("one two three")

    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            stream=True,
            logprobs=True,
            top_logprobs=1,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].model_dump()["prompt_token_ids"] == TinyChatCodec().render(HELLO)
    said = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in said) == "one two three"
    ids = [token for choice in said for token in choice.model_dump().get("token_ids") or ()]
    assert ids == saying("one two three")
    entries = [entry for choice in said if choice.logprobs for entry in choice.logprobs.content or ()]
    assert [entry.token for entry in entries] == [*"one two three", "<end>"]
    assert all(len(entry.top_logprobs) == 1 for entry in entries)
    assert [choice.finish_reason for choice in said if choice.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 14
    assert {chunk.model_dump()["weights_version"] for chunk in chunks} == {0}
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_tool_call_has_its_name_first_and_then_its_arguments(served: Served, client: openai.OpenAI) -> None:
    served.model.script = calling("37+58", before="Let me see.")

    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=[CALCULATOR]) as stream:
        answer = stream.get_final_completion()

    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "calculator"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"expression": "37+58"}


@both_ways
def test_a_stream_never_shows_the_beginning_of_a_stop_string(served: Served, client: openai.OpenAI) -> None:
    served.model.script = saying("one twofold two times")

    stream = client.chat.completions.create(model="tiny", messages=HELLO, stop="two t", n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert texts == {0: "one twofold ", 1: "one twofold "}


def test_completions_stream_too(served: Served, client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="tiny", prompt="ab", stream=True, extra_body={"return_token_ids": True})
    )

    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "95"
    assert chunks[0].model_dump()["choices"][0]["prompt_token_ids"] == tokenizer.encode("ab")
    assert chunks[-1].choices[0].finish_reason == "stop"


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "roles"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature"),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "n": 0}, "'n'"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "stop": [""]}, "stop"),
        ({"messages": HELLO, "top_logprobs": 3}, "logprobs"),
        ({"messages": HELLO, "stream": "yes"}, "stream"),
        ({"messages": HELLO, "tools": [{"name": "x"}]}, "tools"),
        ({"messages": HELLO, "tools": [CALCULATOR], "tool_choice": "required"}, "cannot make a model call a tool"),
        ({"messages": HELLO, "tools": [CALCULATOR], "tool_choice": NAMED}, "cannot make a model call a tool"),
        ({"messages": HELLO, "presence_penalty": 1.0}, "presence_penalty"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": HELLO, "stop_token_ids": [True]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "context of 256"),
    ],
)
def test_a_bad_request_is_refused_in_words(served: Served, body: dict[str, Any], words: str) -> None:
    response = raw(served, model="tiny", **body)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_what_is_not_json_or_too_large_or_elsewhere_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{served.url}/v1/chat/completions"
    assert httpx.post(url, content=b"{").status_code == 400
    assert httpx.post(url, content=b"[]").status_code == 400
    assert httpx.get(url).status_code == 405
    assert httpx.get(f"{served.url}/nowhere").status_code == 404
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 1000)
    assert httpx.post(url, content=b" " * 1001).status_code == 413
    assert httpx.post(url, content=iter([b" " * 600, b" " * 600])).status_code == 413
    assert raw(served, model="tiny", messages=HELLO).status_code == 200


def test_a_key_is_asked_for_where_one_was_set() -> None:
    with serving(ScriptedModel(saying("1")), api_key="secret") as served:
        assert raw(served, messages=HELLO).status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        with openai.OpenAI(base_url=served.base_url, api_key="secret", max_retries=0) as client:
            assert client.models.list().data[0].id == "tiny"


def test_models_and_status_are_told(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    raw(served, messages=HELLO)
    status = httpx.get(f"{served.url}/agl/status").json()
    assert (status["model"], status["served"], status["engine"]["running"]) == ("tiny", 1, 0)


# ---------------------------------------------------------------------- seeds, faults, repetitions


def test_a_seed_is_reproducible_and_choices_differ() -> None:
    torch.manual_seed(0)
    with serving(TinyModel(TinyShape(max_length=256))) as served:
        body = {"messages": HELLO, "max_tokens": 12, "seed": 5, "n": 3}
        texts = [[choice["message"]["content"] for choice in raw(served, **body).json()["choices"]] for _ in range(2)]

    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


class SlowModel(ScriptedModel):
    """Waits before every step until it is let go on."""

    def __init__(self, script: list[int] | None = None) -> None:
        super().__init__(script)
        self.may_go_on = threading.Event()

    def decode(self, tokens: Any, positions: Any, cache: Any, n: int) -> Any:
        self.may_go_on.wait(0.01)
        return super().decode(tokens, positions, cache, n)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(model_module, "SMALL_MODEL_PARAMETERS", 0)
    with serving(SlowModel(saying("x" * 200))) as served:
        yield served


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_slot(slow: Served, is_stream: bool) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": HELLO, "stream": is_stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        until(lambda: slow.app.engine.statistics()["running"] == 1)

    until(lambda: slow.app.engine.statistics()["running"] == 0)

    assert slow.app.engine.statistics()["sampled_tokens"] < 150


@both_ways
def test_a_failed_step_is_a_server_error_and_the_next_call_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(ScriptedModel, "decode", fail)
        response = raw(served, messages=HELLO)
        streamed = raw(served, messages=HELLO, stream=True)

    assert response.status_code == 500
    assert "out of memory" in response.json()["error"]["message"]
    # A stream may have begun before the step failed; then its last event says so, and it never ends as a whole one.
    assert "out of memory" in streamed.text
    assert "[DONE]" not in streamed.text
    assert raw(served, messages=HELLO).status_code == 200


def test_a_stream_that_fails_in_one_choice_ends_the_others(slow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_fails(choice: Choice, token_id: int, logprob: float) -> bool:
        taken[choice.index] += 1
        if choice.index == 0 and taken[0] > 3:
            raise RuntimeError("nothing more is taken")
        return take(choice, token_id, logprob)

    taken = [0, 0]
    take = Choice.take
    monkeypatch.setattr(Choice, "take", first_fails)

    streamed = raw(slow, messages=HELLO, stream=True, n=2)

    assert "nothing more is taken" in streamed.text
    until(lambda: slow.app.engine.statistics()["running"] == 0)
    assert slow.app.engine.statistics()["cancelled"] == 1


def test_choices_that_are_sampled_later_say_so(slow: Served) -> None:
    with ThreadPoolExecutor(1) as threads:
        url = f"{slow.url}/v1/chat/completions"
        body = {"messages": HELLO, "n": 17, "max_tokens": 30}  # one more than there are slots
        call = threads.submit(httpx.post, url, json=body, timeout=PATIENCE_SECONDS)
        until(lambda: slow.app.engine.statistics()["sampled_tokens"] > 16)
        slow.app.engine.load_weights(4, slow.model.state()).result(PATIENCE_SECONDS)
        slow.model.may_go_on.set()
        answer = call.result().json()

    assert (answer["weights_version"], answer["last_weights_version"]) == (0, 4)


# ---------------------------------------------------------------------- new weights


def announce(served: Served, key: str | None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}/agl/weights", json=body, headers=headers, timeout=PATIENCE_SECONDS)


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    """Other weights of the scripted model, in a folder of their own."""
    pytest.importorskip("numpy", reason="safetensors writes through NumPy")
    from agentlightning.engine.weights import write_weights

    path = tmp_path / "published" / "weights.safetensors"
    path.parent.mkdir()
    write_weights(path, ScriptedModel(saying("95")).state())
    return path


@pytest.fixture
def retrained(weights_file: Path) -> Iterator[Served]:
    """A server that takes new weights out of that folder."""
    model = ScriptedModel(saying("95"))
    with serving(model, api_key="calls", weights_key="weights", weights_folders=[weights_file.parent]) as served:
        yield served


def test_new_weights_are_announced_by_their_file(retrained: Served, weights_file: Path) -> None:
    assert announce(retrained, "weights", version=3, path=str(weights_file)).json() == {"version": 3}

    refused = announce(retrained, "weights", version=4, path=str(weights_file.with_name("none")))
    malformed = announce(retrained, "weights", version="4")

    assert (refused.status_code, malformed.status_code) == (400, 400)
    assert "no file" in refused.json()["error"]["message"]
    assert retrained.app.status()["engine"]["weights_version"] == 3


@pytest.mark.parametrize("key", [None, "calls", "weightsx"], ids=["none", "that of calls", "longer"])
def test_the_weights_have_a_key_of_their_own(retrained: Served, weights_file: Path, key: str | None) -> None:
    refused = announce(retrained, key, version=3, path=str(weights_file))

    assert (refused.status_code, retrained.app.status()["engine"]["weights_version"]) == (401, 0)


def test_the_key_of_the_weights_does_not_open_the_model(retrained: Served) -> None:
    headers = {"Authorization": "Bearer weights"}

    refused = httpx.post(f"{retrained.base_url}/chat/completions", json={"messages": HELLO}, headers=headers)

    assert refused.status_code == 401


@pytest.mark.parametrize("options", [{}, {"api_key": "calls"}], ids=["open", "with a key for calls"])
def test_a_server_without_a_key_for_its_weights_takes_none(weights_file: Path, options: dict[str, Any]) -> None:
    with serving(ScriptedModel(saying("95")), **options) as served:
        refused = announce(served, "calls", version=3, path=str(weights_file))

        assert (refused.status_code, served.app.status()["engine"]["weights_version"]) == (403, 0)
        assert "AGL_ENGINE_WEIGHTS_KEY" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["outside", "missing outside", "climbing", "link", "a zero byte"])
def test_only_files_in_the_named_folder_are_taken(retrained: Served, weights_file: Path, kind: str) -> None:
    outside = weights_file.parent.parent / "outside.safetensors"
    outside.write_bytes(weights_file.read_bytes())
    link = weights_file.with_name("link.safetensors")
    link.symlink_to(outside)
    path = {
        "outside": str(outside),
        "missing outside": str(outside.with_name("nothing")),
        "climbing": f"{weights_file.parent}/../outside.safetensors",
        "link": str(link),
        "a zero byte": f"{weights_file}\0",
    }[kind]

    refused = announce(retrained, "weights", version=3, path=path)

    assert refused.status_code == (400 if kind == "a zero byte" else 403), refused.text
    if kind != "a zero byte":
        assert f"takes no weights from '{path}', only from its folder" in refused.json()["error"]["message"]
    assert retrained.app.status()["engine"]["weights_version"] == 0


@pytest.mark.parametrize("options", [{"api_key": ""}, {"api_key": "  "}, {"weights_key": ""}])
def test_an_empty_key_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="is empty"), serving(ScriptedModel(), **options):
        pass
