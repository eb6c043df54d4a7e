"""The stub model over plain HTTP."""

import base64
import json
import struct
from itertools import groupby
from typing import Any

import aiohttp
import pytest
import requests

from tests.stub_model.script import Answer, Failure, Script, by_prompt
from tests.stub_model.server import StubModel, running
from tests.stub_model.words import ToolCall, encode

MODEL = {"model": "stub-model"}
WEATHER = ToolCall.of("weather", city="Oslo", days=2)


def post(model: StubModel, path: str, body: dict[str, Any], **options: Any) -> requests.Response:
    return requests.post(f"{model.url}/v1/{path}", json={**MODEL, **body}, timeout=10, **options)


def chat(model: StubModel, text: str = "Hi", **body: Any) -> dict[str, Any]:
    answered = post(model, "chat/completions", {"messages": [{"role": "user", "content": text}], **body})
    answered.raise_for_status()
    told: dict[str, Any] = answered.json()
    return told


def events(response: requests.Response) -> list[Any]:
    """The data of every event of a stream; JSON where it is JSON."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def streamed_chat(model: StubModel, text: str = "Hi", **body: Any) -> list[Any]:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **body}
    return events(post(model, "chat/completions", body))


# ---------------------------------------------------------------------- chat completions


def test_chat_completion_is_whole(stub_model: StubModel) -> None:
    told = chat(stub_model, "Hello world")

    (choice,) = told["choices"]
    assert (told["object"], choice["message"]["content"], choice["finish_reason"]) == (
        "chat.completion",
        "Hello world",
        "stop",
    )
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert "token_ids" not in choice


def test_chat_stream_has_role_contents_finish_usage_and_end(stub_model: StubModel) -> None:
    told = streamed_chat(stub_model, "Hello world", stream_options={"include_usage": True})

    deltas = [chunk["choices"][0]["delta"] for chunk in told[:4]]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told[:4]] == [None, None, None, "stop"]
    assert (told[0]["usage"], told[4]["choices"], told[4]["usage"]["total_tokens"]) == (None, [], 8)
    assert told[5] == "[DONE]"


def test_chat_stream_without_usage_has_none(stub_model: StubModel) -> None:
    assert not any("usage" in chunk for chunk in streamed_chat(stub_model)[:-1])


def test_tool_calls_are_told_with_their_ids(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer(tool_calls=(WEATHER, ToolCall("noon", id="mine")))])

    choice = chat(stub_model)["choices"][0]

    first, second = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
    assert (first["id"], second["id"]) == ("call_1_0_0", "mine")


def test_streamed_tool_call_has_name_first_and_arguments_after(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("Let me see.", (WEATHER,))])

    deltas = [c["choices"][0]["delta"] for c in streamed_chat(stub_model)[:-1]]

    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert (calls[0]["id"], calls[0]["function"]) == ("call_1_0_0", {"name": "weather", "arguments": ""})
    assert all("id" not in call for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == WEATHER.arguments


def test_several_choices_come_interleaved(stub_model: StubModel) -> None:
    stub_model.script = Script([["one two", "three four"]])

    told = streamed_chat(stub_model, n=2)[:-1]

    order = [chunk["choices"][0]["index"] for chunk in told]
    texts = ["", ""]
    for chunk in told:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert (order, texts) == ([0, 1] * 4, ["one two", "three four"])


def test_single_answer_serves_every_choice(stub_model: StubModel) -> None:
    assert [c["message"]["content"] for c in chat(stub_model, n=3)["choices"]] == ["Hi", "Hi", "Hi"]


@pytest.mark.parametrize(
    ("limit", "text", "reason"),
    [
        ({"max_tokens": 2}, "one two", "length"),
        ({"max_completion_tokens": 1}, "one", "length"),
        ({"max_tokens": 9}, "one two three", "stop"),
        ({"stop": "three"}, "one two ", "stop"),
        ({"stop": ["two", "one"]}, "", "stop"),
    ],
    ids=["max", "completion-max", "roomy", "stop", "first-stop"],
)
def test_limits_cut_the_answer(stub_model: StubModel, limit: dict[str, Any], text: str, reason: str) -> None:
    choice = chat(stub_model, "one two three", **limit)["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


def test_logprobs_align_with_the_tokens(stub_model: StubModel) -> None:
    choice = chat(stub_model, "Hello world", logprobs=True, top_logprobs=2, return_token_ids=True)["choices"][0]

    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " world", "<|end|>"]
    assert len(content) == len(choice["token_ids"])
    assert all(-1 <= entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)


def test_streamed_logprobs_are_those_of_the_whole(stub_model: StubModel) -> None:
    wish = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    whole = chat(stub_model, "Hello world", **wish)["choices"][0]["logprobs"]["content"]

    chunks = [c["choices"][0]["logprobs"] for c in streamed_chat(stub_model, "Hello world", **wish)[:-1]]

    assert [entry for chunk in chunks if chunk for entry in chunk["content"]] == whole
    assert whole[0]["token"] == f"token_id:{encode('Hello')[0]}"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"text": "Hi"}),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
            },
            {"a": "Hi"},
        ),
    ],
    ids=["text", "object", "schema"],
)
def test_json_mode_gives_json(stub_model: StubModel, form: dict[str, Any], expected: Any) -> None:
    content = chat(stub_model, response_format=form)["choices"][0]["message"]["content"]

    assert content == "Hi" if expected is None else json.loads(content) == expected


def test_images_are_part_of_the_prompt(stub_model: StubModel) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "What is this?"}, image]
    post(stub_model, "chat/completions", {"messages": [{"role": "user", "content": content}]}).raise_for_status()
    chat(stub_model, "What is this?")

    seen, without = stub_model.requests
    assert seen.messages[0].images == ("data:image/png;base64,AAAA",)
    assert len(seen.prompt_token_ids) == len(without.prompt_token_ids) + 2


# ---------------------------------------------------------------------- token ids


def test_token_ids_of_a_conversation_go_on(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    tools = [{"type": "function", "function": {"name": "weather"}}]
    history: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    body = {"messages": history, "tools": tools, "return_token_ids": True}

    first = post(stub_model, "chat/completions", body).json()
    message = first["choices"][0]["message"]
    history += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}]
    second = post(stub_model, "chat/completions", body).json()

    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before


def test_streamed_token_ids_are_those_of_the_whole(stub_model: StubModel) -> None:
    stub_model.script = Script(lambda request: Answer("I look.", (WEATHER,)))
    whole = chat(stub_model, return_token_ids=True)

    chunks = streamed_chat(stub_model, return_token_ids=True)[:-1]

    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]


def test_instrumented_server_always_returns_ids_at_the_top() -> None:
    with running(token_ids="instrumented") as model:
        told = chat(model, n=2)

    assert told["prompt_token_ids"] == list(model.requests[0].prompt_token_ids)
    assert [len(ids) for ids in told["response_token_ids"]] == [2, 2]


def test_server_without_token_ids_ignores_the_wish() -> None:
    with running(token_ids="none") as model:
        assert "prompt_token_ids" not in chat(model, return_token_ids=True)


# ---------------------------------------------------------------------- the other dialects


def test_completion_takes_text_or_token_ids(stub_model: StubModel) -> None:
    by_text = post(stub_model, "completions", {"prompt": "one two", "return_token_ids": True}).json()["choices"][0]
    by_ids = post(stub_model, "completions", {"prompt": encode("one two"), "return_token_ids": True}).json()

    assert by_text["text"] == "one two"
    assert by_text["prompt_token_ids"] == by_ids["choices"][0]["prompt_token_ids"] == encode("one two")


def test_streamed_completion_joins_to_the_whole(stub_model: StubModel) -> None:
    body = {"prompt": "one two", "stream": True, "logprobs": 1, "stream_options": {"include_usage": True}}

    told = events(post(stub_model, "completions", body))

    assert "".join(chunk["choices"][0]["text"] for chunk in told[:3]) == "one two"
    assert told[2]["choices"][0]["finish_reason"] == "stop"
    assert (told[3]["usage"]["completion_tokens"], told[4]) == (3, "[DONE]")


def test_response_stream_opens_fills_and_closes_every_item(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("So be it.", (WEATHER,))])

    told = events(post(stub_model, "responses", {"input": "Go", "stream": True}))

    kinds = [kind.removeprefix("response.") for kind, _ in groupby(event["type"] for event in told)]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    done = "output_item.done"
    assert kinds == ["created", "in_progress", *text, done, *call, done, "completed"]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["response"]["output"][1]["name"] == "weather"


def test_response_goes_on_from_an_earlier_one(stub_model: StubModel) -> None:
    first = post(stub_model, "responses", {"input": "one", "instructions": "Be brief."}).json()
    post(stub_model, "responses", {"input": "two", "previous_response_id": first["id"]}).raise_for_status()

    assert [message.text for message in stub_model.requests[1].messages] == ["one", "one", "two"]


def test_items_of_one_answer_are_one_message(stub_model: StubModel) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "4"}
    items = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "well"}, call, output]
    post(stub_model, "responses", {"input": items}).raise_for_status()

    assert [(m.role, m.text, len(m.tool_calls)) for m in stub_model.requests[0].messages] == [
        ("user", "go", 0),
        ("assistant", "well", 1),
        ("tool", "4", 0),
    ]


def test_message_stream_has_the_events_of_every_block(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])
    body = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 99, "stream": True}

    told = events(post(stub_model, "messages", body))

    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, _ in groupby(event["type"] for event in told)] == [
        *["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    ]
    parts = [e["delta"]["partial_json"] for e in told if e.get("delta", {}).get("type") == "input_json_delta"]
    assert "".join(parts) == WEATHER.arguments
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_message_history_with_tools_goes_on(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    history: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    body = {"messages": history, "max_tokens": 99, "system": "Be brief.", "return_token_ids": True}

    first = post(stub_model, "messages", body).json()
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "rain"}
    history += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = post(stub_model, "messages", body).json()

    before = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before


def test_message_stops_at_a_stop_sequence(stub_model: StubModel) -> None:
    body = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 9, "stop_sequences": ["two"]}

    told = post(stub_model, "messages", body).json()

    assert (told["content"][0]["text"], told["stop_reason"], told["stop_sequence"]) == ("one ", "stop_sequence", "two")


def test_tokens_of_a_message_are_counted(stub_model: StubModel) -> None:
    body = {"messages": [{"role": "user", "content": "one two"}]}

    assert post(stub_model, "messages/count_tokens", body).json() == {"input_tokens": 5}


def test_embeddings_come_as_numbers_or_packed(stub_model: StubModel) -> None:
    plain = post(stub_model, "embeddings", {"input": ["a b", "a b"], "dimensions": 4}).json()["data"]
    packed = post(stub_model, "embeddings", {"input": "a b", "dimensions": 4, "encoding_format": "base64"}).json()

    unpacked = struct.unpack("<4f", base64.b64decode(packed["data"][0]["embedding"]))
    assert plain[0]["embedding"] == plain[1]["embedding"] == pytest.approx(unpacked)


def test_models_are_listed() -> None:
    with running(models=("a", "b")) as model:
        listed = requests.get(f"{model.url}/v1/models", timeout=10).json()["data"]
        shown = requests.get(f"{model.url}/v1/models/b", timeout=10).json()

    assert ([entry["id"] for entry in listed], shown["id"]) == (["a", "b"], "b")


# ---------------------------------------------------------------------- errors and bad weather

OPENAI_CALL = ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
ANTHROPIC_CALL = ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ("chat/completions", {**OPENAI_CALL[1], "n": 0}, "n"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content"),
        ("completions", {}, "prompt"),
        ("responses", {"input": "x", "previous_response_id": "none"}, "previous_response_id"),
        ("embeddings", {"input": []}, "input"),
        ("chat/completions", {"model": None}, "model"),
    ],
)
def test_bad_requests_are_told_in_openai_shape(
    stub_model: StubModel, path: str, body: dict[str, Any], param: str
) -> None:
    answered = post(stub_model, path, body)

    error = answered.json()["error"]
    assert (answered.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)


def test_bad_request_is_told_in_anthropic_shape(stub_model: StubModel) -> None:
    answered = post(stub_model, "messages", {"messages": [{"role": "user", "content": "Hi"}]})

    assert answered.status_code == 400
    assert answered.json()["error"] == {"type": "invalid_request_error", "message": "max_tokens: Field required"}


def test_key_is_demanded_in_either_header() -> None:
    with running(api_key="secret") as model:
        statuses = [
            post(model, *OPENAI_CALL).status_code,
            post(model, *OPENAI_CALL, headers={"authorization": "Bearer secret"}).status_code,
            post(model, *ANTHROPIC_CALL, headers={"x-api-key": "wrong"}).status_code,
            post(model, *ANTHROPIC_CALL, headers={"x-api-key": "secret"}).status_code,
        ]

    assert statuses == [401, 200, 401, 200]
    assert len(model.requests) == 4


@pytest.mark.parametrize(
    ("call", "kind"), [(OPENAI_CALL, "invalid_request_error"), (ANTHROPIC_CALL, "not_found_error")]
)
def test_unknown_model_is_not_found(stub_model: StubModel, call: tuple[str, dict[str, Any]], kind: str) -> None:
    answered = post(stub_model, call[0], {**call[1], "model": "other"})

    assert (answered.status_code, answered.json()["error"]["type"]) == (404, kind)


@pytest.mark.parametrize(
    ("call", "status", "kind"),
    [
        (OPENAI_CALL, 429, "rate_limit_error"),
        (OPENAI_CALL, 500, "server_error"),
        (ANTHROPIC_CALL, 429, "rate_limit_error"),
        (ANTHROPIC_CALL, 529, "overloaded_error"),
    ],
)
def test_scripted_failures_are_told(
    stub_model: StubModel, call: tuple[str, dict[str, Any]], status: int, kind: str
) -> None:
    stub_model.script = Script([Failure(status, "no", retry_after_seconds=1.5)])

    answered = post(stub_model, *call)

    assert (answered.status_code, answered.json()["error"]["type"]) == (status, kind)
    assert answered.headers["retry-after"] == "1.5"


def test_used_up_script_says_so(stub_model: StubModel) -> None:
    stub_model.script = Script(["only"])
    chat(stub_model)

    answered = post(stub_model, *OPENAI_CALL)

    assert answered.status_code == 500
    assert "has 1 turns, and this is request 2" in answered.json()["error"]["message"]


def test_connection_is_dropped_before_the_answer(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("x", cut_after_events=0)])

    with pytest.raises(requests.ConnectionError):
        post(stub_model, *OPENAI_CALL)


def test_connection_is_dropped_in_the_middle_of_a_stream(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("one two three", cut_after_events=2)])
    seen: list[bytes] = []

    answered = post(stub_model, OPENAI_CALL[0], {**OPENAI_CALL[1], "stream": True}, stream=True)
    with pytest.raises(requests.RequestException):
        seen.extend(line for line in answered.iter_lines(chunk_size=1) if line)

    assert len(seen) == 2


def test_stream_is_cut_with_an_error_event(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("one two", cut_after_events=3, cut_with=Failure(529, "busy"))])

    told = events(post(stub_model, ANTHROPIC_CALL[0], {**ANTHROPIC_CALL[1], "stream": True}))

    assert [event["type"] for event in told] == ["message_start", "ping", "content_block_start", "error"]
    assert told[-1]["error"] == {"type": "overloaded_error", "message": "busy"}


def test_slow_answer_outlasts_an_impatient_client(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("late", latency_seconds=5)])

    with pytest.raises(requests.Timeout):
        requests.post(f"{stub_model.url}/v1/{OPENAI_CALL[0]}", json={**MODEL, **OPENAI_CALL[1]}, timeout=0.2)


def test_answers_depend_on_the_prompt(stub_model: StubModel) -> None:
    stub_model.script = Script(by_prompt({r"\d": "a number", "why": "because"}))

    said = [chat(stub_model, text)["choices"][0]["message"]["content"] for text in ("41", "why", "hm")]

    assert said == ["a number", "because", "I do not know."]


async def test_asynchronous_tests_use_it_too(stub_model: StubModel) -> None:
    async with aiohttp.ClientSession() as session:
        body = {**MODEL, **OPENAI_CALL[1]}
        async with session.post(f"{stub_model.url}/chat/completions", json=body, headers={"X-Mine": "1"}) as answered:
            told = await answered.json()

    assert told["choices"][0]["message"]["content"] == "Hi"
    assert stub_model.requests[0].headers["x-mine"] == "1"
    assert stub_model.requests[0].body == body
