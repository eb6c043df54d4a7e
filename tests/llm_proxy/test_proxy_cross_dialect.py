"""A client of one dialect served by a backend of another, with the vendors' own clients."""

import itertools
import json
from typing import Any

import anthropic
import openai
import pytest

from tests.llm_proxy.openai_suite import USER, WEATHER
from tests.llm_proxy.proxied import HERE, MODEL, entry, proxied
from tests.llm_proxy.speakers import SPEAKERS
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel

PAIRS = list(itertools.product(SPEAKERS, SPEAKERS))
each_dialect = pytest.mark.parametrize(
    ("client", "backend"), [("chat", "messages"), ("messages", "responses"), ("responses", "chat")]
)
"""Each once as the client's, and once as the backend's."""


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


@each_dialect
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


@pytest.mark.parametrize(
    ("cut_with", "words"), [(Failure(500, "out of luck"), "out of luck"), (None, "broke off")], ids=["error", "cut"]
)
@each_dialect
def test_stream_that_breaks_is_an_error(
    stub_model: StubModel, client: str, backend: str, cut_with: Failure | None, words: str
) -> None:
    stub_model.script = Script([Answer("one two three", cut_after_events=5, cut_with=cut_with)])
    vendor: Any = anthropic if client == "messages" else openai
    with proxied(entry(stub_model.url, backend)) as door:
        speaker = SPEAKERS[client](door, is_streaming=True)
        speaker.user("Hello")
        with pytest.raises(vendor.APIError, match=words):
            speaker.turn()
        call = door.only_call()

    assert (call.outcome, call.tries, call.span.status.status_code) == ("failed", 1, "ERROR")


def test_first_words_arrive_before_the_last_are_said(stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("one" + " more" * 200 + " last", pause_seconds=0.05)])
    with proxied(entry(stub_model.url, "chat")) as door:
        with door.anthropic().messages.stream(model=MODEL, max_tokens=99, messages=USER) as stream:
            assert next(iter(stream.text_stream)) == "one"
        call = door.only_call()

    assert call.outcome == "cancelled"
    assert call.get("gen_ai.completion.0.content").startswith("one")
    assert "last" not in call.response_body


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_response_that_goes_on_from_a_stored_one_is_refused_with_the_way_out(stub_model: StubModel, field: str) -> None:
    told: Any = {field: "stored_1"}
    with proxied(entry(stub_model.url)) as door:
        with pytest.raises(openai.BadRequestError, match=f"'{field}' .* send the earlier items in 'input'"):
            door.openai().responses.create(model=MODEL, input="Hi", **told)

        assert stub_model.requests == []


def test_what_the_backend_cannot_be_told_is_refused(stub_model: StubModel) -> None:
    with proxied(entry(stub_model.url, "messages")) as door:
        with pytest.raises(openai.BadRequestError) as caught:
            door.openai().chat.completions.create(model=MODEL, messages=USER, logit_bias={"1": 5})

        assert caught.value.param == "logit_bias"
        assert door.only_call().outcome == "refused"
    assert stub_model.requests == []
