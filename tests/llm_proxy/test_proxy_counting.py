"""Counting tokens before a request is made: by the backend where it can, and else by the length of the text."""

from typing import Any

import anthropic
import orjson
import pytest

from tests.llm_proxy.proxied import MODEL, Proxied, entry, proxied
from tests.stub_model.raw import whole
from tests.stub_model.server import serving

QUESTION: list[anthropic.types.MessageParam] = [{"role": "user", "content": "What is 2+2?"}]
SECRET = "sk-ant-not-for-agents"


def count(door: Proxied) -> int:
    return door.anthropic().messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens


def test_backend_that_speaks_messages_counts_and_nothing_is_recorded() -> None:
    with serving(whole(b'{"input_tokens": 14}')) as server, proxied(entry(server.url, "messages")) as door:
        assert count(door) == 14

        (asked,) = server.requests
        assert asked.path == "/v1/messages/count_tokens"
        assert asked.body == {"model": MODEL, "messages": QUESTION}
        assert door.spans() == []


@pytest.mark.parametrize("provider", ["hosted_vllm", "vllm", "agl"])
def test_backend_with_a_tokenizer_counts_the_chat(provider: str) -> None:
    told = whole(b'{"count": 21, "max_model_len": 99, "tokens": [1]}')
    with serving(told) as server, proxied(entry(server.url, model_of=f"{provider}/{MODEL}")) as door:
        assert count(door) == 21

        (asked,) = server.requests
        assert asked.path == "/tokenize"
        assert asked.body == {"model": MODEL, "messages": QUESTION}
        assert door.spans() == []


@pytest.mark.parametrize(
    "answer",
    [whole(b"{}", 404), whole(b"Not Found", 404), whole(b"[]"), whole(b'{"count": "many"}')],
    ids=["no tokenizer", "no JSON", "no object", "no number"],
)
def test_count_of_a_backend_without_a_tokenizer_is_estimated(answer: bytes) -> None:
    with serving(answer) as server, proxied(entry(server.url)) as door:
        assert count(door) == 5  # 16 characters


def test_backend_that_cannot_count_is_not_asked() -> None:
    long: list[anthropic.types.MessageParam] = [{"role": "user", "content": [{"type": "text", "text": "x" * 4000}]}]
    with serving(whole(b"{}")) as server, proxied(entry(server.url, model_of=f"openai/{MODEL}")) as door:
        told = door.anthropic().messages.count_tokens(model=MODEL, messages=long)

        assert 1000 < told.input_tokens < 1010
        assert server.requests == []


def test_request_that_is_no_chat_is_estimated() -> None:
    document: Any = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    messages: Any = [{"role": "user", "content": [{"type": "search_result", "text": "x"}, document]}]
    with serving(whole(b'{"count": 1}')) as server, proxied(entry(server.url)) as door:
        assert door.anthropic().messages.count_tokens(model=MODEL, messages=messages).input_tokens > 1000

        assert server.requests == []


def test_error_of_the_backend_is_told_without_its_key() -> None:
    told = {"type": "error", "error": {"type": "authentication_error", "message": f"bad key {SECRET}"}}
    refusing = whole(orjson.dumps(told), 401)
    with (
        serving(refusing) as server,
        proxied(entry(server.url, "messages", api_key=SECRET)) as door,
        pytest.raises(anthropic.AuthenticationError, match=r"bad key \[redacted\]"),
    ):
        count(door)


def test_locked_proxy_counts_for_nobody_without_a_key() -> None:
    with serving(whole(b'{"input_tokens": 1}')) as server, proxied(entry(server.url, "messages"), api_key="k") as door:
        with pytest.raises(anthropic.AuthenticationError):
            count(door)

        assert server.requests == []
