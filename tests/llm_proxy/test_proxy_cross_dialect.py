"""A client of one dialect served by a backend of another, with the vendors' own clients."""

import itertools
import json
from typing import Any

import anthropic
import openai
import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet
from tests.llm_proxy.openai_suite import USER, WEATHER
from tests.llm_proxy.proxied import HERE, MODEL, Proxied, entry, proxied
from tests.llm_proxy.speakers import SPEAKERS
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel

PAIRS = list(itertools.product(SPEAKERS, SPEAKERS))
CROSSED = [(client, backend) for client, backend in PAIRS if client != backend]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("client", "backend"), PAIRS)
def test_two_turns_with_a_tool(stub_model: StubModel, client: str, backend: str, is_streaming: bool) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    with proxied(entry(stub_model.url, backend)) as door:
        speaker = SPEAKERS[client](door, is_streaming=is_streaming)
        speaker.user("Weather in Oslo?")
        first = speaker.turn()
        speaker.result(first.calls[0][0], "rain")
        second = speaker.turn()
        calls = door.calls()

    assert (first.text, [call[1:] for call in first.calls]) == ("I look.", [("weather", {"city": "Oslo"})])
    assert (second.text, second.calls) == ("It rains.", ())
    assert (first.ended, second.ended) == speaker.ENDED
    assert [request.dialect for request in stub_model.requests] == [backend, backend]
    assert [request.is_streaming for request in stub_model.requests] == [is_streaming, is_streaming]
    _check_history(stub_model.requests[1].messages)
    for call, request, said in zip(calls, stub_model.requests, (first, second), strict=True):
        assert (call.outcome, call.get(f"{HERE}.dialect")) == ("answered", client)
        assert call.get(f"{HERE}.backend_dialect") == (None if client == backend else backend)
        assert said.tokens == (call.get("gen_ai.usage.prompt_tokens"), call.get("gen_ai.usage.completion_tokens"))
        assert said.tokens[0] == len(request.prompt_token_ids)


def _check_history(messages: Any) -> None:
    """What the backend is told in the second turn."""
    spoken = [message for message in messages if message.role not in ("system", "developer")]
    assert [message.role for message in spoken] == ["user", "assistant", "tool"]
    assert [message.text for message in spoken] == ["Weather in Oslo?", "I look.", "rain"]
    assert [(call.name, json.loads(call.arguments)) for call in spoken[1].tool_calls] == [("weather", {"city": "Oslo"})]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", SPEAKERS)
def test_token_ids_of_a_chat_backend_reach_training(stub_model: StubModel, client: str, is_streaming: bool) -> None:
    stub_model.script = Script(["Sunny."])
    with proxied(entry(stub_model.url, "chat")) as door:
        speaker = SPEAKERS[client](door, is_streaming=is_streaming)
        speaker.user("Weather?")
        speaker.turn()
        (triplet,) = LlmProxyTraceToTriplet().adapt(door.spans())

    assert triplet.prompt["token_ids"] == list(stub_model.requests[0].prompt_token_ids)
    assert len(triplet.response["token_ids"]) == 3


@pytest.mark.parametrize(("client", "backend"), CROSSED)
def test_error_has_the_shape_of_the_client(stub_model: StubModel, client: str, backend: str) -> None:
    stub_model.script = Script([Failure(429, "slow down", retry_after_seconds=7)])
    vendor: Any = anthropic if client == "messages" else openai
    with proxied(entry(stub_model.url, backend)) as door:
        speaker = SPEAKERS[client](door, is_streaming=False)
        speaker.user("Hello")
        with pytest.raises(vendor.RateLimitError, match="slow down") as caught:
            speaker.turn()

        assert caught.value.response.headers["retry-after"] == "7"
        assert (door.only_call().outcome, door.only_call().status) == ("failed", 429)


@pytest.mark.parametrize(("client", "backend"), CROSSED)
def test_error_within_a_stream(stub_model: StubModel, client: str, backend: str) -> None:
    stub_model.script = Script([Answer("one two three", cut_after_events=5, cut_with=Failure(500, "out of luck"))])
    vendor: Any = anthropic if client == "messages" else openai
    with proxied(entry(stub_model.url, backend)) as door:
        speaker = SPEAKERS[client](door, is_streaming=True)
        speaker.user("Hello")
        with pytest.raises(vendor.APIError, match="out of luck"):
            speaker.turn()

        assert (door.only_call().outcome, door.only_call().span.status.status_code) == ("failed", "ERROR")


@pytest.mark.parametrize(("client", "backend"), PAIRS)
def test_cut_stream_is_an_error(stub_model: StubModel, client: str, backend: str) -> None:
    stub_model.script = Script([Answer("one two three", cut_after_events=5)])
    vendor: Any = anthropic if client == "messages" else openai
    with proxied(entry(stub_model.url, backend)) as door:
        speaker = SPEAKERS[client](door, is_streaming=True)
        speaker.user("Hello")
        with pytest.raises(vendor.APIError):
            speaker.turn()

        assert (door.only_call().outcome, door.only_call().tries) == ("failed", 1)


@pytest.mark.parametrize(("client", "backend"), CROSSED)
def test_first_words_arrive_before_the_last_are_said(stub_model: StubModel, client: str, backend: str) -> None:
    words = "one" + " more" * 200 + " last"
    stub_model.script = Script([Answer(words, pause_seconds=0.05)])
    with proxied(entry(stub_model.url, backend)) as door:
        seen = _first_text(door, client)
        call = door.only_call()

    assert words.startswith(seen.strip())
    assert call.outcome == "cancelled"
    assert "last" not in call.response_body


def _first_text(door: Proxied, client: str) -> str:
    """The first words of a stream, which is then left."""
    if client == "messages":
        with door.anthropic().messages.stream(model=MODEL, max_tokens=99, messages=USER) as stream:
            return next(iter(stream.text_stream))
    if client == "chat":
        with door.openai().chat.completions.create(model=MODEL, messages=USER, stream=True) as chunks:
            return next(text for chunk in chunks if (text := chunk.choices[0].delta.content))
    with door.openai().responses.create(model=MODEL, input=USER, stream=True) as events:
        return next(event.delta for event in events if event.type == "response.output_text.delta")


@pytest.mark.parametrize("provider", ["hosted_vllm", "vllm", "agl"])
@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
def test_response_of_a_server_that_is_trained_is_a_chat_with_tokens(
    stub_model: StubModel, provider: str, is_streaming: bool
) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])
    with proxied(entry(stub_model.url, model_of=f"{provider}/{MODEL}")) as door:
        speaker = SPEAKERS["responses"](door, is_streaming=is_streaming)
        speaker.user("Weather?")
        said = speaker.turn()
        call = door.only_call()

    assert [name for _, name, _ in said.calls] == ["weather"]
    assert [request.dialect for request in stub_model.requests] == ["chat"]
    assert call.get(f"{HERE}.token_ids") == "given"
    assert json.loads(call.get("prompt_token_ids")) == list(stub_model.requests[0].prompt_token_ids)
    assert len(json.loads(call.get("logprobs.content"))) == len(json.loads(call.get("response_token_ids")))


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_response_that_goes_on_from_a_stored_one_is_refused_with_the_way_out(stub_model: StubModel, field: str) -> None:
    told: Any = {field: "stored_1"}
    with proxied(entry(stub_model.url)) as door:
        with pytest.raises(openai.BadRequestError, match=f"'{field}' .* send the earlier items in 'input'"):
            door.openai().responses.create(model=MODEL, input="Hi", **told)

        assert stub_model.requests == []


def test_what_the_backend_cannot_be_told_is_refused(stub_model: StubModel) -> None:
    with proxied(entry(stub_model.url, "messages")) as door:
        client = door.openai()
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=USER, logit_bias={"1": 5})
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")

        assert caught.value.param == "logit_bias"
        assert [call.outcome for call in door.calls()] == ["refused", "refused"]
    assert stub_model.requests == []
