"""Reading requests and writing answers, in ASGI's messages."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from agentlightning.llm_proxy.attribution import Refused
from agentlightning.llm_proxy.dialects.failures import Failure

__all__ = ["answer_headers", "read_body", "send_answer"]

_PASSED: Final = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "openai-model", "x-should-retry")
_PASSED_PREFIXES: Final = ("x-ratelimit-", "anthropic-ratelimit-", "openai-processing-")
_LEFT: Final = "The caller left before the request was whole."


async def read_body(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limit: int) -> bytes:
    """The body of a request; raises `Refused` above the limit."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(body) <= limit:
        if message["type"] == "http.disconnect":
            raise Refused(Failure(400, _LEFT, "invalid_request_error"))
        return body
    parts, size = [body], len(body)
    while message.get("more_body", False) and size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(Failure(400, _LEFT, "invalid_request_error"))
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > limit:
        raise Refused(Failure(413, f"The request is larger than {limit} bytes.", None))
    return b"".join(parts)


def answer_headers(headers: Mapping[str, str], content_type: str | None = None) -> list[tuple[bytes, bytes]]:
    """Of a backend's headers, those that mean something to the caller."""
    kept = [
        (name.encode(), value.encode("latin-1"))
        for name, value in headers.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    ]
    kind = content_type or headers.get("content-type", "application/json")
    return [(b"content-type", kind.encode("latin-1")), *kept]


async def send_answer(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    status: int,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
