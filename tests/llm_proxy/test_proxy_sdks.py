"""The proxy as the vendors' own clients see it, each in the backend's own dialect."""

from typing import Any

import anthropic
import openai
import pytest

from tests.llm_proxy.fixtures import CLAUDE
from tests.llm_proxy.openai_suite import (
    SCHEMA,
    USER,
    WEATHER,
    OpenAIChatSuite,
    OpenAIErrorsSuite,
    OpenAIOtherSuite,
)
from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel


class TestOpenAIChat(OpenAIChatSuite):
    """With the release of this environment."""


class TestOpenAIOther(OpenAIOtherSuite):
    """With the release of this environment."""


class TestOpenAIErrors(OpenAIErrorsSuite):
    """With the release of this environment."""


# ---------------------------------------------------------------------- Anthropic


def test_anthropic_message(door: Proxied) -> None:
    told = door.anthropic().messages.create(model=CLAUDE, max_tokens=99, messages=USER)

    assert (told.content[0].to_dict()["text"], told.stop_reason) == ("Hello there", "end_turn")
    assert told.usage.output_tokens == 3


def test_anthropic_tool_loop(door: Proxied, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,)), "It rains."])
    ask: Any = {"model": CLAUDE, "max_tokens": 99, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    client = door.anthropic()

    first = client.messages.create(messages=USER, **ask)
    result = {"type": "tool_result", "tool_use_id": first.content[1].to_dict()["id"], "content": "rain"}
    history = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=history, **ask)

    assert (first.stop_reason, first.content[1].to_dict()["input"]) == ("tool_use", {"city": "Oslo"})
    assert second.content[0].to_dict()["text"] == "It rains."


def test_anthropic_stream(door: Proxied, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("I look.", (WEATHER,))])

    with door.anthropic().messages.stream(model=CLAUDE, max_tokens=99, messages=USER) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()

    assert "".join(texts) == "I look."
    assert (final.content[1].to_dict()["input"], final.stop_reason) == ({"city": "Oslo"}, "tool_use")
    assert door.only_call().outcome == "answered"


async def test_anthropic_asynchronous_client(door: Proxied) -> None:
    async with anthropic.AsyncAnthropic(base_url=door.endpoint, api_key="any", max_retries=0) as client:
        told = await client.messages.create(model=CLAUDE, max_tokens=99, messages=USER)
        async with client.messages.stream(model=CLAUDE, max_tokens=99, messages=USER) as stream:
            texts = [text async for text in stream.text_stream]

    assert (told.content[0].to_dict()["text"], "".join(texts)) == ("Hello there", "Hello there")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, anthropic.BadRequestError),
        (401, anthropic.AuthenticationError),
        (403, anthropic.PermissionDeniedError),
        (404, anthropic.NotFoundError),
        (413, anthropic.RequestTooLargeError),
        (429, anthropic.RateLimitError),
        (500, anthropic.InternalServerError),
        (529, anthropic.OverloadedError),
    ],
    ids=str,
)
def test_anthropic_error(door: Proxied, stub_model: StubModel, status: int, kind: type[Exception]) -> None:
    stub_model.script = Script([Failure(status, "no luck", retry_after_seconds=3)])

    with pytest.raises(kind, match="no luck") as caught:
        door.anthropic().messages.create(model=CLAUDE, max_tokens=9, messages=USER)

    assert isinstance(caught.value, anthropic.APIStatusError)
    assert caught.value.response.headers["retry-after"] == "3"
    assert (door.only_call().outcome, door.only_call().status) == ("failed", status)


def test_anthropic_error_within_a_stream(door: Proxied, stub_model: StubModel) -> None:
    stub_model.script = Script([Answer("one two three", cut_after_events=4, cut_with=Failure(529, "busy"))])

    with (
        pytest.raises(anthropic.APIError, match="busy"),
        door.anthropic().messages.stream(model=CLAUDE, max_tokens=9, messages=USER) as stream,
    ):
        stream.until_done()

    assert (door.only_call().outcome, door.only_call().status) == ("failed", 529)


def test_anthropic_models(door: Proxied) -> None:
    client = door.anthropic()

    assert [model.id for model in client.models.list()] == [MODEL, CLAUDE]
    assert client.models.retrieve(CLAUDE).display_name == CLAUDE
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


# ---------------------------------------------------------------------- keys


def test_client_with_the_key_of_an_attempt_needs_no_path(stub_model: StubModel) -> None:
    with proxied(entry(stub_model.url), api_key="the-proxy's-own") as door:
        attempt = door.rollout.attempt.attempt_id
        key = door.proxy.attempt_key(door.rollout.rollout_id, attempt)

        door.openai(base_url=f"{door.proxy.endpoint}/v1", api_key=key).chat.completions.create(
            model=MODEL, messages=USER
        )

        assert door.only_call().span.attempt_id == attempt
        assert stub_model.requests[0].headers.get("authorization") is None


def test_wrong_keys_raise_what_the_clients_have_for_them(stub_model: StubModel) -> None:
    with proxied(entry(stub_model.url), api_key="the-proxy's-own") as door:
        other = door.proxy.attempt_key("another", "attempt")

        with pytest.raises(openai.AuthenticationError):
            door.openai(api_key="wrong", max_retries=2).chat.completions.create(model=MODEL, messages=USER)
        with pytest.raises(openai.PermissionDeniedError):
            door.openai(api_key=other).chat.completions.create(model=MODEL, messages=USER)
        with pytest.raises(anthropic.AuthenticationError):
            door.anthropic(api_key="wrong").messages.create(model=MODEL, max_tokens=9, messages=USER)

    assert stub_model.requests == []
