"""Reading requests and writing answers, in ASGI's messages."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from agentlightning.llm_proxy.attribution import Refused
from agentlightning.llm_proxy.dialects.failures import Failure
from agentlightning.utils.deadline import within

__all__ = ["answer_headers", "read_body", "send_answer"]

SILENCE_SECONDS: Final = 60.0
"""How long a caller may send nothing before its request is whole."""
_PASSED: Final = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "openai-model", "x-should-retry")
_PASSED_PREFIXES: Final = ("x-ratelimit-", "anthropic-ratelimit-", "openai-processing-")
_LEFT: Final = "The caller left before the request was whole."


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    headers: Mapping[bytes, bytes],
    limit: int,
    *,
    silence_seconds: float = SILENCE_SECONDS,
) -> bytes:
    """The body of a request; raises `Refused` above the limit, and for a caller who stops sending."""
    told = headers.get(b"content-length", b"")
    if told.isdigit() and int(told) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size, is_whole = 0, False
    while not is_whole:
        try:
            message = await within(silence_seconds, receive())
        except TimeoutError:
            words = f"Nothing more of the request came for {silence_seconds:g} s."
            raise Refused(Failure(408, words, "invalid_request_error")) from None
        if message["type"] == "http.disconnect":
            raise Refused(Failure(400, _LEFT, "invalid_request_error"))
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        is_whole = not message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> Refused:
    return Refused(Failure(413, f"The request is larger than {limit} bytes.", None))


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
