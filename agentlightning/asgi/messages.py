"""The types of ASGI, and the response header that every answer carries."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

__all__ = ["NOSNIFF", "ConnectionScope", "Receive", "Send", "with_nosniff"]

ConnectionScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
"""Keeps browsers from taking an answer for a script or a page because of what it holds."""


def with_nosniff(send: Send) -> Send:
    """Send answers with `NOSNIFF`, once."""

    async def send_with_nosniff(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            message = {**message, "headers": headers if NOSNIFF in headers else [*headers, NOSNIFF]}
        await send(message)

    return send_with_nosniff
