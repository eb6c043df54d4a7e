"""One HTTP request and its answer on the bare ASGI interface: bodies within limits and in time, gzip both ways.

A web framework's own request handling costs more than the store's work; the hot routes do without it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from agentlightning.asgi.compression import COMPRESS_FROM_BYTES, compressed, decompress, too_large
from agentlightning.asgi.messages import NOSNIFF, ConnectionScope, Receive, Send
from agentlightning.errors import InvalidValue
from agentlightning.store.http.failures import Failure

__all__ = ["GZIP_MAGIC", "MOST_FRAME_BYTES", "Disconnected", "Request", "SlowRequest", "answer"]

MOST_FRAME_BYTES = 1024 * 1024
"""About how large a frame of the live channel becomes before another is begun."""
GZIP_MAGIC = b"\x1f\x8b"
_REQUEST_TIMEOUT = 408


class SlowRequest(Exception):  # named for what happened, as all of ours
    """The body did not arrive in time; told to the client as 408, never raised to a user."""

    @property
    def failure(self) -> Failure:
        return Failure(_REQUEST_TIMEOUT, "RequestTimeout", str(self))


class Disconnected(Exception):  # named for what happened, as all of ours
    """The client is gone; there is nobody to answer."""


@dataclass(frozen=True)
class Request:
    """A request as the ASGI server hands it over."""

    scope: ConnectionScope
    receive: Receive

    def header(self, name: bytes) -> str:
        """A header's value; empty if it was not sent."""
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return ""

    @property
    def raw_path(self) -> bytes:
        """The path as it was sent, still escaped."""
        raw: bytes | None = self.scope.get("raw_path")
        return raw if raw is not None else self.scope["path"].encode()

    @property
    def query(self) -> list[tuple[str, str]]:
        text = self.scope["query_string"]
        return parse_qsl(text.decode("latin-1"), keep_blank_values=True) if text else []

    async def body(self, *, max_bytes: int, timeout_seconds: float) -> bytes:
        """The whole body, decompressed."""
        announced = self.header(b"content-length")
        if announced.isdigit() and int(announced) > max_bytes:
            raise too_large(max_bytes)
        try:
            body = await asyncio.wait_for(self._read(max_bytes), timeout_seconds)
        except asyncio.TimeoutError as error:
            raise SlowRequest(f"The body did not arrive within {timeout_seconds:g} s.") from error
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding in ("", "identity"):
            return body
        if encoding != "gzip":
            raise InvalidValue(f"Content-Encoding is '{encoding}'; send gzip, or nothing.")
        return await decompress(body, max_bytes)

    async def _read(self, max_bytes: int) -> bytes:
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            body: bytes = message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            return body
        chunks = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise Disconnected
            chunks += message.get("body", b"")
            if len(chunks) > max_bytes:
                raise too_large(max_bytes)
            if not message.get("more_body"):
                return bytes(chunks)
            message = await self.receive()

    async def until_disconnect(self) -> None:
        """Return when the client is gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header names gzip, and not to exclude it."""
    for part in header.lower().split(","):
        name, _, quality = part.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "").rstrip("0.") != "q="
    return False


async def answer(
    request: Request,
    send: Send,
    status: int,
    body: bytes,
    *,
    media_type: bytes = b"application/json",
    further_headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send an answer, compressed if that is worth it and the client can read it."""
    headers = [(b"content-type", media_type), NOSNIFF, *further_headers]
    if len(body) > COMPRESS_FROM_BYTES and _accepts_gzip(request.header(b"accept-encoding")):
        body = compressed(body)
        headers.append((b"content-encoding", b"gzip"))
    headers.append((b"content-length", b"%d" % len(body)))
    if status == _REQUEST_TIMEOUT:
        headers.append((b"connection", b"close"))  # the rest of the body is not waited for
    if status == 401:  # the status that must say how to come in
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
