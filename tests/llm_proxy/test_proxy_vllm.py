"""vLLM behind the proxy, by what a real server answered: tokens and ends reach training, errors reach agents."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agentlightning.adapter import TokenSequence, TraceToTrajectory
from tests.llm_proxy.proxied import HERE, MODEL, Proxied, entry, proxied
from tests.llm_proxy.recorded import agents_request, body_of, names, recorded, replayed
from tests.llm_proxy.speakers import SPEAKERS
from tests.stub_model.raw import STREAM_HEAD, chunk, then_hang, until, whole
from tests.stub_model.server import serving

SERVED = "feat"
"""The name of the model in most recordings."""
QUESTION = "What is 3+4? Answer with one number."
CHATS = names(path="/v1/chat/completions")
TEXTS = names(path="/v1/completions")
REFUSALS = [name for path in ("chat/completions", "completions") for name in names(path=f"/v1/{path}", status=400)]


def vllm(url: str, *, model: str = SERVED) -> Any:
    """An entry that agents call as the stub model, or by the name that vLLM has for it."""
    return entry(url, model=model, model_of=f"hosted_vllm/{model}")


def post(door: Proxied, name: str) -> httpx.Response:
    """Send the recorded request as an agent would have, without what the proxy adds."""
    path = recorded(name)["path"].removeprefix("/v1")
    return httpx.post(f"{door.endpoint}/v1{path}", json=agents_request(name), timeout=30.0)


def choices_of(name: str) -> list[dict[str, Any]]:
    """The choices as they were recorded, ids and log-probabilities of a stream joined."""
    entry = recorded(name)
    if "lines" not in entry:
        return list(entry["response"]["choices"])
    joined: dict[int, dict[str, Any]] = {}
    for line in entry["lines"]:
        for choice in [] if line.endswith("[DONE]") else json.loads(line.removeprefix("data: "))["choices"]:
            whole_one = joined.setdefault(choice["index"], {"token_ids": [], "finish_reason": None})
            whole_one["token_ids"] += choice.get("token_ids") or []
            whole_one["finish_reason"] = choice["finish_reason"] or whole_one["finish_reason"]
    return [joined[number] for number in sorted(joined)]


def only_sequence(door: Proxied) -> TokenSequence:
    (sequence,) = TraceToTrajectory().adapt(door.spans()).sequences
    return sequence


@pytest.mark.parametrize("name", [*CHATS, *TEXTS])
def test_every_recorded_answer_has_as_many_log_probabilities_as_ids_in_its_span(name: str) -> None:
    asked = recorded(name)["request"]
    with serving(replayed(name)) as server, proxied(vllm(server.url, model=asked["model"])) as door:
        told = post(door, name)
        call = door.only_call()
        sequence = only_sequence(door)

    assert told.status_code == 200
    assert '"token_ids":[' not in told.text.replace(" ", "")
    sent = server.requests[0].body
    assert sent["return_token_ids"] is True
    assert {field: sent[field] for field in agents_request(name)} == agents_request(name)
    first = choices_of(name)[0]
    assert list(sequence.sampled_ids) == first["token_ids"]
    assert len(json.loads(call.get("logprobs.content"))) == len(first["token_ids"])
    assert None not in sequence.logprobs[-len(first["token_ids"]) :]
    assert call.get(f"{HERE}.token_ids") == "given"


def test_stream_whose_last_chunk_has_several_tokens_is_shown_without_them() -> None:
    with serving(replayed("chat_stream_ids_logprobs_usage")) as server, proxied(vllm(server.url)) as door:
        told = post(door, "chat_stream_ids_logprobs_usage")

    chunks = [json.loads(line.removeprefix("data: ")) for line in told.text.splitlines() if line.startswith("data: {")]
    assert "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]) == "3 + 4 ="
    assert not any("usage" in chunk for chunk in chunks)  # the agent did not ask for it
    assert not any(choice["logprobs"] for chunk in chunks for choice in chunk["choices"])


def test_both_answers_of_one_call_reach_the_agent_and_the_first_is_trained() -> None:
    with serving(replayed("chat_n2_seed")) as server, proxied(vllm(server.url)) as door:
        told = post(door, "chat_n2_seed").json()
        call = door.only_call()

    both = choices_of("chat_n2_seed")
    assert [choice["message"]["content"] for choice in told["choices"]] == [one["message"]["content"] for one in both]
    assert json.loads(call.get("response_token_ids")) == both[0]["token_ids"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chat_ids_logprobs", "stop"),
        ("chat_stop_text", "stop"),
        ("chat_length", "length"),
        ("chat_stream_ids_logprobs_usage", "length"),
        ("chat_while_pausing_abort", "abort"),
    ],
)
def test_training_knows_how_answers_ended(name: str, reason: str) -> None:
    with serving(replayed(name)) as server, proxied(vllm(server.url)) as door:
        post(door, name)
        sequence = only_sequence(door)

    assert [call.finish_reason for call in sequence.calls] == [reason]
    assert sequence.is_truncated is (reason != "stop")


def test_answer_that_the_agent_left_is_cut_off() -> None:
    begun = [f"{line}\n\n".encode() for line in recorded("chat_stream_ids_logprobs_usage")["lines"][:3]]
    with serving(then_hang(STREAM_HEAD, *map(chunk, begun))) as server, proxied(vllm(server.url)) as door:
        with httpx.stream(
            "POST", f"{door.endpoint}/v1/chat/completions", json=agents_request("chat_stream_ids_logprobs_usage")
        ) as told:
            next(line for line in told.iter_lines() if '" +"' in line)
        until(lambda: server.open_connections == 0)
        sequence = only_sequence(door)

    assert [(call.finish_reason, sequence.sampled_ids) for call in sequence.calls] == [("cancelled", (35, 1232))]
    assert sequence.is_truncated


def test_two_turns_are_one_sequence() -> None:
    turns = "chat_ids_logprobs", "chat_second_turn"
    with serving(*map(replayed, turns)) as server, proxied(vllm(server.url)) as door:
        for name in turns:
            post(door, name)
        sequence = only_sequence(door)

    sampled = [token for name in turns for token in choices_of(name)[0]["token_ids"]]
    assert list(sequence.sampled_ids) == sampled


# ---------------------------------------------------------------------- other APIs


def text_of(door: Proxied, client: str, *, stream: bool) -> str:
    """What the vendor's client gives for an answer, or for the pieces of one; cut off or not."""
    if client == "responses":
        create: Any = door.openai().responses.create
        told = create(model=MODEL, input=QUESTION, stream=stream)
        if not stream:
            return str(told.output_text)
        return "".join(event.delta for event in told if event.type == "response.output_text.delta")
    create = door.anthropic().messages.create
    told = create(model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=12, stream=stream)
    if not stream:
        return str(told.content[0].text)
    return "".join(event.delta.text for event in told if event.type == "content_block_delta")


@pytest.mark.parametrize("client", ["responses", "messages"])
@pytest.mark.parametrize(
    ("name", "is_streaming"),
    [("chat_ids_logprobs", False), ("chat_stream_ids_logprobs_usage", True)],
    ids=["whole", "stream"],
)
def test_other_apis_are_chats_with_tokens_for_vllm(client: str, name: str, is_streaming: bool) -> None:
    with serving(replayed(name)) as server, proxied(entry(server.url)) as door:
        said = text_of(door, client, stream=is_streaming)
        sequence = only_sequence(door)

    assert [asked.path for asked in server.requests] == ["/v1/chat/completions"]
    assert said == ("3 + 4 =" if is_streaming else "3 + 4 = 7")
    assert list(sequence.sampled_ids) == choices_of(name)[0]["token_ids"]
    assert None not in sequence.logprobs[-len(sequence.sampled_ids) :]


@pytest.mark.parametrize(("client", "ended"), [("responses", "incomplete"), ("messages", "max_tokens")])
def test_answer_that_vllm_broke_off_is_not_whole_in_other_apis(client: str, ended: str) -> None:
    with serving(replayed("chat_while_pausing_abort")) as server, proxied(entry(server.url)) as door:
        speaker = SPEAKERS[client](door, is_streaming=False)
        speaker.user(QUESTION)

        assert speaker.turn().ended == ended


@pytest.mark.parametrize("client", SPEAKERS)
def test_tool_call_in_vllms_form_is_trained(client: str) -> None:
    """No tool call was recorded; this one is written into an answer that was."""
    answer = recorded("chat_ids_logprobs")["response"]
    (choice,) = answer["choices"]
    called = {
        "id": "chatcmpl-tool-1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    message = {**choice["message"], "content": None, "tool_calls": [called]}
    body = body_of("chat_ids_logprobs", choices=[{**choice, "message": message, "finish_reason": "tool_calls"}])
    with serving(whole(body)) as server, proxied(entry(server.url)) as door:
        speaker = SPEAKERS[client](door, is_streaming=False)
        speaker.user("Weather?")
        said = speaker.turn()
        sequence = only_sequence(door)

    assert [call[1:] for call in said.calls] == [("weather", {"city": "Oslo"})]
    assert list(sequence.sampled_ids) == choice["token_ids"]
    assert [call.finish_reason for call in sequence.calls] == ["tool_calls"]


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_reaches_the_agent_as_vllm_wrote_it(name: str) -> None:
    with serving(replayed(name)) as server, proxied(vllm(server.url)) as door:
        told = post(door, name)
        call = door.only_call()

    assert (told.status_code, told.json()) == (400, recorded(name)["response"])
    assert (call.outcome, call.error) == ("failed", recorded(name)["response"]["error"]["message"])
    assert len(server.requests) == 1 + ("logprobs" in name)  # again only if it may be about what the proxy added


@pytest.mark.parametrize(
    ("name", "of_openai", "of_anthropic"),
    [
        ("error_max_tokens_too_many", openai.BadRequestError, anthropic.BadRequestError),
        ("error_tools_without_parser", openai.BadRequestError, anthropic.BadRequestError),
        ("lora_chat_after_unload", openai.NotFoundError, anthropic.NotFoundError),
        ("chat_after_sleep_2", openai.InternalServerError, anthropic.InternalServerError),
    ],
)
def test_errors_are_those_of_the_agents_own_client(name: str, of_openai: type, of_anthropic: type) -> None:
    words = recorded(name)["response"]["error"]["message"][:40]
    with serving(replayed(name)) as server, proxied(entry(server.url)) as door:
        for client, kind in (("chat", of_openai), ("responses", of_openai), ("messages", of_anthropic)):
            speaker = SPEAKERS[client](door, is_streaming=False)
            speaker.user(QUESTION)
            with pytest.raises(kind) as raised:
                speaker.turn()

            assert words in str(raised.value)
