"""The answers of one server to queries: what they take while they are made, and until their clients have read them.

How large an answer is, is known once it is made. So few queries are made at a time, and those that are likely to be
large wait for room. A client that reads as fast as its answer is made keeps that room to the end. For any other the
rest is buffered, as bytes that are counted until they are sent, and the room goes to the next: making an answer never
waits for somebody who reads slowly. A client that reads a large answer too slowly is disconnected.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from agentlightning.asgi.bodies import GRACE_SECONDS, ROOM_BYTES, SLOWEST_BYTES_PER_SECOND, SMALL_BYTES, Room
from agentlightning.asgi.request import Disconnected

__all__ = ["SHARE_BYTES", "Answers", "kind_of", "patience_seconds"]

SHARE_BYTES: Final = 1024**2
"""What a connection may have unsent without a least speed; above it, no further query of it begins."""
MOST_MADE: Final = 4
"""Queries of one server that are made at a time."""
UNREAD_SECONDS: Final = 60.0
"""A client that reads nothing for so long, of what is ready for it, is disconnected."""
LEAST_BYTES_PER_SECOND: Final = SLOWEST_BYTES_PER_SECOND // 8
"""At which a connection above its share is read; `SLOWEST_BYTES_PER_SECOND` for each `ROOM_BYTES` that are unsent."""
_STALL_SECONDS: Final = 0.1
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.001, 0.25


def kind_of(operation: str, arguments: object) -> str:
    """The kind of a query, by which the size of its answer is guessed: those for few items are apart."""
    limit = str(arguments.get("limit")) if isinstance(arguments, Mapping) else ""
    # A query is for few items if the limit it names is below 100.
    return f"{operation} of few" if limit.isdigit() and len(limit) <= 2 else operation


def patience_seconds(size: int) -> float:
    """How long a client may take to read so many bytes and keep their room."""
    # A client that reads 8 MiB a second keeps the room of its answer.
    return _STALL_SECONDS + size / (8 * 1024**2)


class Answers:
    """An answer is taken to be as large as the largest of its kind before it, which is forgotten slowly; the first of a
    kind is made alone, and before others."""

    def __init__(self) -> None:
        self.making = Room(MOST_MADE)
        self.unsent_bytes = 0
        """Buffered for clients that read slowly."""
        self._room = Room(ROOM_BYTES)
        self._largest: dict[str, int] = {}

    def room_for(self, kind: str) -> AbstractAsyncContextManager[None]:
        """Room for a large answer; small ones need none."""
        size = self._largest.get(kind, ROOM_BYTES)
        return self._room.taken(size, is_next=kind not in self._largest) if size > SMALL_BYTES else nullcontext()

    def count(self, kind: str, size: int) -> None:
        """Remember the bytes that an answer had as JSON."""
        # Objects take about four times the memory of their JSON.
        self._largest[kind] = max(size * 4, self._largest.get(kind, 0) * 99 // 100)

    async def until_read(self, unread: Callable[[], int]) -> None:
        """Wait until a client has read what is buffered for it; `Disconnected` if it is too slow.

        Args:
            unread: How many bytes are left.
        """
        left = charged = at_start = unread()
        started = moved = time.monotonic()
        pause = _FIRST_POLL_SECONDS
        self.unsent_bytes += charged
        try:
            while left:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
                before, left, now = left, unread(), time.monotonic()
                self.unsent_bytes += left - charged
                charged = left
                moved = now if left != before else moved
                if now - moved > UNREAD_SECONDS:
                    raise Disconnected(f"The client has read nothing for {UNREAD_SECONDS:g} s.")
                if now - started > GRACE_SECONDS:
                    least = max(LEAST_BYTES_PER_SECOND, SLOWEST_BYTES_PER_SECOND * (self.unsent_bytes // ROOM_BYTES))
                    if left > SHARE_BYTES and at_start - left < least * (now - started):
                        raise Disconnected(f"The client reads less than {least} of its {left} bytes in a second.")
                    at_start, started = left, now
        finally:
            self.unsent_bytes -= charged
