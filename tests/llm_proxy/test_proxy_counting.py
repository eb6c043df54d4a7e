"""Counting tokens before a request is made: by backends that speak Anthropic's messages, and by nobody else."""

import anthropic
import orjson
import pytest

from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.llm_proxy.rough_server import rough, whole

QUESTION: list[anthropic.types.MessageParam] = [{"role": "user", "content": "What is 2+2?"}]
SECRET = "sk-ant-not-for-agents"


def count(door: Proxied) -> int:
    return door.anthropic().messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens


def test_backend_that_speaks_messages_counts_and_nothing_is_recorded() -> None:
    with rough(whole(b'{"input_tokens": 14}')) as server, proxied(entry(server.url, "messages")) as door:
        assert count(door) == 14

        (asked,) = server.asked
        assert asked.path == "/v1/messages/count_tokens"
        assert asked.json == {"model": MODEL, "messages": QUESTION}
        assert door.spans() == []


def test_other_backends_cannot_count() -> None:
    with rough(whole(b"{}")) as server, proxied(entry(server.url)) as door:
        with pytest.raises(anthropic.NotFoundError, match="no backend of it speaks Anthropic's messages"):
            count(door)

        assert server.asked == []


def test_error_of_the_backend_is_told_without_its_key() -> None:
    told = {"type": "error", "error": {"type": "authentication_error", "message": f"bad key {SECRET}"}}
    refusing = whole(orjson.dumps(told), 401)
    with (
        rough(refusing) as server,
        proxied(entry(server.url, "messages", api_key=SECRET)) as door,
        pytest.raises(anthropic.AuthenticationError, match=r"bad key \[redacted\]"),
    ):
        count(door)


def test_locked_proxy_counts_for_nobody_without_a_key() -> None:
    with rough(whole(b'{"input_tokens": 1}')) as server, proxied(entry(server.url, "messages"), api_key="k") as door:
        with pytest.raises(anthropic.AuthenticationError):
            count(door)

        assert server.asked == []
