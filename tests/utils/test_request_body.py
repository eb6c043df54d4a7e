"""Bodies of requests, from callers who send them as they should and others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentlightning.utils.request_body import read_body


class Refusal(Exception):
    pass


def sends(*messages: dict[str, Any]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """A caller who sends these, and then nothing for ever."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(body: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": not is_last}


@pytest.mark.parametrize(
    "messages",
    [
        [part(b"abcdef", is_last=True)],
        [part(b"abc"), part(b""), part(b"def", is_last=True)],
        [part(b"abcdef"), {"type": "http.request"}],
    ],
    ids=["at once", "in parts", "with an empty end"],
)
async def test_a_body_up_to_the_limit_is_read_whole(messages: list[dict[str, Any]]) -> None:
    assert await read_body(sends(*messages), {b"content-length": b"6"}, 6, refusal=Refusal) == b"abcdef"


@pytest.mark.parametrize(
    ("headers", "messages", "status", "words"),
    [
        pytest.param({b"content-length": b"7"}, [], 413, "larger than 6 bytes", id="too large, and says so"),
        pytest.param({}, [part(b"abc"), part(b"defg")], 413, "larger than 6 bytes", id="too large, and does not"),
        pytest.param({}, [part(b"abc")], 408, "Nothing more of the request came", id="silent"),
        pytest.param({}, [part(b"abc"), {"type": "http.disconnect"}], 400, "The caller left", id="gone"),
    ],
)
async def test_others_are_refused_as_the_server_does_it(
    headers: dict[bytes, bytes], messages: list[dict[str, Any]], status: int, words: str
) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        await read_body(sends(*messages), headers, 6, refusal=Refusal, silence_seconds=0.02)

    assert caught.value.args[0] == status
