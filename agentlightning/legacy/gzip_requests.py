"""Compressed request bodies for the legacy server: unpacked before a route sees them, and offered with every answer.

The offer is the response header `Accept-Encoding` of RFC 7694. A client that has seen it may compress what it posts.
"""

from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.asgi.compression import decompress
from agentlightning.errors import StoreError

__all__ = ["GzipRequests"]

MAX_BODY_BYTES = 256 * 1024 * 1024
"""Largest body after unpacking."""


class GzipRequests:
    """Middleware around an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_offer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["accept-encoding"] = "gzip"
            await send(message)

        if Headers(scope=scope).get("content-encoding") == "gzip":
            await self._unpacked(scope, receive, send_with_offer)
        else:
            await self._app(scope, receive, send_with_offer)

    async def _unpacked(self, scope: Scope, receive: Receive, send: Send) -> None:
        packed = await _whole_body(receive)
        if packed is None:
            return
        try:
            body = await decompress(packed, MAX_BODY_BYTES)
        except StoreError as error:
            await JSONResponse({"detail": str(error)}, error.http_status)(scope, receive, send)
            return
        hidden = (b"content-encoding", b"content-length")
        headers = [(name, value) for name, value in scope["headers"] if name not in hidden]
        headers.append((b"content-length", b"%d" % len(body)))
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_unpacked() -> Message:
            return messages.pop() if messages else await receive()

        await self._app({**scope, "headers": headers}, receive_unpacked, send)


async def _whole_body(receive: Receive) -> bytes | None:
    """The body as it was sent; None if the client went away."""
    chunks = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(chunks)
