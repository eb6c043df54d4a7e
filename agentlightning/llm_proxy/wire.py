"""Reading requests and writing answers, in ASGI's messages."""

import functools
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from agentlightning.dialects.failures import Failure
from agentlightning.llm_proxy.attribution import Refused
from agentlightning.utils import request_body

__all__ = ["answer_headers", "read_body", "send_answer"]

_PASSED: Final = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "openai-model", "x-should-retry")
_PASSED_PREFIXES: Final = ("x-ratelimit-", "anthropic-ratelimit-", "openai-processing-")


def _refused(status: int, words: str) -> Refused:
    return Refused(Failure(status, words, None))


read_body = functools.partial(request_body.read_body, refusal=_refused)
"""The body of a request; raises `Refused` above the limit, and for a caller who stops sending."""


def answer_headers(headers: Mapping[str, str], content_type: str) -> list[tuple[bytes, bytes]]:
    """Of a backend's headers, those that mean something to the caller."""
    kept = [
        (name.encode(), _bytes(value))
        for name, value in headers.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    ]
    return [(b"content-type", content_type.encode()), *kept]


def _bytes(value: str) -> bytes:
    """A header's value as it was on the wire; what came from a library may hold more than bytes can."""
    return value.encode("utf-8", "surrogateescape")


async def send_answer(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    status: int,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
