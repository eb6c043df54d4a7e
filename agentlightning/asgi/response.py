"""Answers: a status, headers and a body, in one piece or in many, compressed where the caller can read it."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import orjson

from agentlightning.asgi.answers import Answers, patience_seconds
from agentlightning.asgi.bodies import SMALL_BYTES
from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, compressed, compressed_parts
from agentlightning.asgi.protocol import Outbox
from agentlightning.asgi.request import Message, Send
from agentlightning.errors import AgentLightningError

Header = tuple[bytes, bytes]

NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
"""Keeps browsers from taking an answer for a script or a page because of what it holds."""
_UNAUTHORIZED, _REQUEST_TIMEOUT = 401, 408


@dataclass(frozen=True)
class Response:
    """One answer."""

    status: int
    body: bytes
    media_type: bytes = b"application/json"
    headers: Sequence[Header] = ()
    """Beside those of the body, and those that a status demands."""

    async def send(self, send: Send, *, accept_encoding: str = "") -> None:
        """Send it, compressed if the header `accept_encoding` of the request allows that and it is worth it."""
        body = self.body
        headers = [(b"content-type", self.media_type), NOSNIFF, *self.headers]
        if len(body) > COMPRESS_FROM_BYTES and _accepts_gzip(accept_encoding):
            body = compressed(body)
            headers.append((b"content-encoding", b"gzip"))
        headers.append((b"content-length", b"%d" % len(body)))
        if self.status == _REQUEST_TIMEOUT:
            headers.append((b"connection", b"close"))  # the rest of the body is not waited for
        if self.status == _UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class LargeResponse:
    """An answer that is made in a thread and sent part by part, so that it holds up nobody.

    The rest is made at once for a client that reads slowly; one that reads too slowly is taken for gone
    (`Disconnected`).
    """

    status: int
    parts: Iterable[bytes]

    async def send(
        self, send: Send, *, accept_encoding: str, answers: Answers, outbox: Outbox, memory: AsyncExitStack
    ) -> None:
        """Make and send it, compressed if the header `accept_encoding` of the request allows that.

        Args:
            memory: What it takes to make it; left when it is made.
        """
        headers = [(b"content-type", b"application/json"), NOSNIFF]
        parts = iter(self.parts)
        if _accepts_gzip(accept_encoding):
            parts = compressed_parts(parts)
            headers.append((b"content-encoding", b"gzip"))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        size, waited = 0, 0.0
        while part := await asyncio.to_thread(next, parts, b""):
            size += len(part)
            began = time.monotonic()
            sending = asyncio.ensure_future(_send_part(send, part))
            try:
                await asyncio.wait([sending], timeout=max(patience_seconds(size) - waited, 0.0))
                waited += time.monotonic() - began
                if not sending.done():
                    rest = deque([part, *await asyncio.to_thread(list, parts)])
                    await memory.aclose()
                    await _send_slowly(send, sending, rest, answers, outbox)
                await sending
            finally:
                sending.cancel()
        await send({"type": "http.response.body", "body": b""})
        if outbox.unsent_bytes() > SMALL_BYTES:  # the last part may be long
            await memory.aclose()
            await answers.until_read(outbox.unsent_bytes)


def _send_part(send: Send, part: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": part, "more_body": True})


async def _send_slowly(
    send: Send, sending: "asyncio.Future[None]", parts: deque[bytes], answers: Answers, outbox: Outbox
) -> None:
    """Send the parts, of which the first is on its way."""

    async def send_all() -> None:
        await sending
        while parts.popleft() and parts:
            await _send_part(send, parts[0])

    rest = asyncio.create_task(send_all())
    try:
        await answers.until_read(lambda: 0 if rest.done() else sum(map(len, parts)) + outbox.unsent_bytes())
        await rest
    finally:
        rest.cancel()


def response_of(status: int, parts: Iterator[bytes]) -> Response | LargeResponse:
    """An answer whose JSON comes in parts: made at once if it is not long."""
    made: list[bytes] = []
    size = 0
    for part in parts:
        made.append(part)
        size += len(part)
        # Smaller answers are made in the event loop.
        if size > 256 * 1024:
            return LargeResponse(status, itertools.chain(made, parts))
    return Response(status, b"".join(made))


def json_response(value: object, status: int = 200, headers: Sequence[Header] = ()) -> Response:
    return Response(status, orjson.dumps(value, default=str), headers=headers)


def error_response(error: AgentLightningError) -> Response:
    """What is wrong as `detail`, and the class of the error as `error_type`."""
    return json_response({"detail": str(error), "error_type": type(error).__name__}, error.http_status)


def with_nosniff(send: Send) -> Send:
    """Send the answers of another application with `NOSNIFF`, once."""

    async def send_with_nosniff(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            message = {**message, "headers": headers if NOSNIFF in headers else [*headers, NOSNIFF]}
        await send(message)

    return send_with_nosniff


def _accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header names gzip, and not to exclude it."""
    for part in header.lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "").rstrip("0.") != "q="
    return False
