"""Server-sent events: bytes of a stream as they arrive, turned into events, and events into bytes.

The parser follows the WHATWG rules on bytes, so a character cut in two by the network does no harm; a byte order mark,
which no model server sends, is not looked for. It gives every event out with the chunk that ends it. What the events
say is left to the dialects; `id`, `retry` and comments are dropped.
"""

from dataclasses import dataclass
from typing import Final

from agentlightning.errors import ProxyError

MAX_EVENT_BYTES: Final = 32 * 1024 * 1024


class InvalidStream(ProxyError):
    """What a backend streams cannot be read as the events of its dialect."""

    http_status = 502


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream."""

    data: bytes
    """The data lines, joined by line feeds."""
    name: str | None = None
    """The event's type; None where the server gave none."""

    def encoded(self) -> bytes:
        """The event as it goes over the wire, with the blank line that ends it."""
        data = self.data
        if b"\n" in data or b"\r" in data:
            data = _with_line_feeds(data).replace(b"\n", b"\ndata: ")
        if self.name is None:
            return b"data: " + data + b"\n\n"
        return b"event: " + self.name.encode() + b"\ndata: " + data + b"\n\n"


DONE: Final = ServerSentEvent(b"[DONE]")
"""The last event of the streams of chat and completions."""


class SseParser:
    """Reads one stream; feed it whatever arrives, in order."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = max_event_bytes
        self._pending = bytearray()
        self._ends_with_return = False

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that this chunk ends.

        Raises:
            InvalidStream: An event is larger than the limit.
        """
        if self._ends_with_return and chunk:
            self._ends_with_return = False
            if chunk[:1] == b"\n":  # the second half of a CRLF whose first half has ended the line
                chunk = chunk[1:]
        if b"\r" in chunk:
            self._ends_with_return = chunk.endswith(b"\r")
            chunk = _with_line_feeds(chunk)
        pending = self._pending
        seen = max(len(pending) - 1, 0)
        pending += chunk
        end = pending.rfind(b"\n\n", seen)
        blocks = [] if end < 0 else bytes(pending[:end]).split(b"\n\n")
        if blocks:
            del pending[: end + 2]
        if max(len(pending), *map(len, blocks), 0) > self._limit:
            raise InvalidStream(f"The backend sent an event of more than {self._limit} bytes, which is the limit.")
        return [event for block in blocks if (event := _event(block)) is not None]

    def close(self) -> bytes:
        """What came after the last whole event, empty after a clean end; the parser can be fed a new stream afterwards.

        The standard drops an event whose blank line never came, because it may be cut short. Some servers leave out the
        last blank line, though: a caller may feed the rest followed by two line feeds to a fresh parser and take the
        event if its data is whole (`[DONE]`, or JSON that can be read), and must treat the stream as cut otherwise.
        """
        rest = bytes(self._pending)
        self._pending.clear()
        self._ends_with_return = False
        return rest.lstrip(b"\n")


def _with_line_feeds(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _event(block: bytes) -> ServerSentEvent | None:
    """The event that lines describe; None, if none of them is data."""
    name: str | None = None
    data: list[bytes] = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ").decode(errors="replace") or None
    return ServerSentEvent(b"\n".join(data), name) if data else None
