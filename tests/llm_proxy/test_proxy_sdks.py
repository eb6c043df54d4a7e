"""The proxy as the vendors' own clients see it, each in the backend's own dialect."""

import anthropic
import pytest

from tests.llm_proxy.fixtures import CLAUDE
from tests.llm_proxy.openai_suite import (
    USER,
    OpenAIChatSuite,
    OpenAIErrorsSuite,
    OpenAIOtherSuite,
)
from tests.llm_proxy.proxied import MODEL, Proxied
from tests.stub_model.script import Answer, Failure, Script
from tests.stub_model.server import StubModel


class TestOpenAIChat(OpenAIChatSuite):
    """With the release of this environment."""


class TestOpenAIOther(OpenAIOtherSuite):
    """With the release of this environment."""


class TestOpenAIErrors(OpenAIErrorsSuite):
    """With the release of this environment."""


# ---------------------------------------------------------------------- Anthropic


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
        (413, anthropic.RequestTooLargeError),
        (429, anthropic.RateLimitError),
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
