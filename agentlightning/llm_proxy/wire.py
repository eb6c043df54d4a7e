"""Reading requests and writing answers, in ASGI's messages."""

from collections.abc import Mapping
from typing import Final

from agentlightning.asgi.request import Receive, Request, Send
from agentlightning.dialects.failures import Failure
from agentlightning.errors import AgentLightningError
from agentlightning.llm_proxy.attribution import Refused

__all__ = ["answer_headers", "read_body", "send_answer"]

_PASSED: Final = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "openai-model", "x-should-retry")
_PASSED_PREFIXES: Final = ("x-ratelimit-", "anthropic-ratelimit-", "openai-processing-")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The body of a request; raises `Refused` above the limit, and for a caller who stops sending."""
    try:
        return await Request({"headers": headers.items()}, receive).body(max_bytes=limit)
    except AgentLightningError as error:
        raise Refused(Failure(error.http_status, str(error), None)) from error


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
    send: Send,
    status: int,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
