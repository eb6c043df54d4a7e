"""Bodies of requests, from callers that send them as they should and others; and callers that leave."""

import asyncio
from typing import Any

import pytest

from agentlightning.asgi import request as asgi_request
from agentlightning.asgi.request import Disconnected, Receive, Request, RequestTimeout
from agentlightning.errors import AgentLightningError, PayloadTooLarge

GONE = {"type": "http.disconnect"}


def sends(*messages: dict[str, Any]) -> Receive:
    """A caller that sends these, and then nothing for ever."""
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
    request = Request({"headers": [(b"content-length", b"6")]}, sends(*messages))
    assert await request.body(max_bytes=6) == b"abcdef"


@pytest.mark.parametrize(
    ("headers", "messages", "refusal", "status"),
    [
        pytest.param({b"content-length": b"7"}, [], PayloadTooLarge, 413, id="too large, and says so"),
        pytest.param({}, [part(b"abc"), part(b"defg")], PayloadTooLarge, 413, id="too large, and does not"),
        pytest.param({}, [part(b"abc")], RequestTimeout, 408, id="silent"),
        pytest.param({}, [part(b"abc"), GONE], Disconnected, 400, id="gone"),
    ],
)
async def test_others_are_refused(
    headers: dict[bytes, bytes],
    messages: list[dict[str, Any]],
    refusal: type[AgentLightningError],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi_request, "IDLE_SECONDS", 0.02)
    with pytest.raises(refusal) as caught:
        await Request({"headers": headers.items()}, sends(*messages)).body(max_bytes=6)
    assert caught.value.http_status == status


async def test_a_caller_that_keeps_sending_must_end_in_time() -> None:
    async def drip() -> dict[str, Any]:
        await asyncio.sleep(0.002)
        return part(b"a")

    with pytest.raises(RequestTimeout, match=r"within 0\.05 s"):
        await Request({"headers": []}, drip).body(max_bytes=10_000, timeout_seconds=0.05)


async def test_work_ends_when_its_caller_leaves() -> None:
    working = asyncio.ensure_future(asyncio.Event().wait())

    with pytest.raises(Disconnected):
        await Request({"headers": []}, sends(GONE)).unless_disconnected(working)

    assert working.cancelled()
    assert await Request({"headers": []}, sends()).unless_disconnected(asyncio.sleep(0, "done")) == "done"
