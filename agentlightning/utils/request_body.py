"""The body of a request in ASGI's messages: read whole, up to a limit, from a caller who keeps sending."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from agentlightning.utils.deadline import within

__all__ = ["read_body"]

SILENCE_SECONDS: Final = 60.0
"""How long a caller may send nothing before its request is whole."""
_BAD_REQUEST, _TIMED_OUT, _TOO_LARGE = 400, 408, 413


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    headers: Mapping[bytes, bytes],
    limit: int,
    *,
    refusal: Callable[[int, str], Exception],
    silence_seconds: float = SILENCE_SECONDS,
) -> bytes:
    """All of a body; one that says beforehand that it is too large is not read.

    Args:
        limit: The most bytes there may be.
        refusal: Makes what is raised for a caller who sends too much, falls silent or leaves, of an HTTP status and
            what is wrong.
    """
    words = f"The request is larger than {limit} bytes."
    told = headers.get(b"content-length", b"")
    if told.isdigit() and int(told) > limit:
        raise refusal(_TOO_LARGE, words)
    parts: list[bytes] = []
    size, is_whole = 0, False
    while not is_whole:
        try:
            message = await within(silence_seconds, receive())
        except TimeoutError:
            raise refusal(_TIMED_OUT, f"Nothing more of the request came for {silence_seconds:g} s.") from None
        if message["type"] == "http.disconnect":
            raise refusal(_BAD_REQUEST, "The caller left before the request was whole.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise refusal(_TOO_LARGE, words)
        is_whole = not message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)
