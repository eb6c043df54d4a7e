"""The bodies of requests to one server: how much memory they may take, and how large ones are parsed.

Parsing holds Python's lock from the first byte to the last, so a thread alone keeps nobody else served. What a body may
cost is therefore bounded before it is parsed: a scan, piece by piece, counts its values. What is left is parsed in a
thread, one large body at a time.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final, TypeVar

from agentlightning.asgi.compression import THREAD_FROM_BYTES, decompress
from agentlightning.asgi.request import Message, Receive, Request, RequestTimeout
from agentlightning.env_var import LightningEnvVar, resolve_int_env_var
from agentlightning.errors import PayloadTooLarge
from agentlightning.utils.deadline import within

__all__ = ["LARGE_BYTES", "Bodies", "Room", "check_values"]

ResultT = TypeVar("ResultT")

LARGE_BYTES: Final = 8 * 1024**2
"""Bodies above this are for the bearer of a server's own key alone."""
MOST_VALUES: Final = 200_000
"""Of JSON in one body: lists, objects, and what is in them."""
ROOM_BYTES: Final = 64 * 1024**2
"""What the bodies of one server may take at a time; further ones wait. One that is larger is let in alone."""
SMALL_BYTES: Final = 64 * 1024
"""Bodies up to this do not count: there are at most as many as connections."""
SLOWEST_BYTES_PER_SECOND: Final = 256 * 1024
"""A body that comes more slowly is given up while others wait for its memory."""
GRACE_SECONDS: Final = 2.0
"""How long a body may be slow."""
_PIECE_BYTES: Final = 64 * 1024
"""Scanned at a time, so that other threads have their turn in between."""
_MARKS: Final = b",[{"
"""There is one of them for each value but the first."""


class Room:
    """An amount that is shared, in the order of the requests for it."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, amount: int, *, is_next: bool = False) -> AsyncIterator[None]:
        """Wait until so much is free, or all, before others if it `is_next`, and have it until the end of the block."""
        amount = min(amount, self.total)
        if self.waiting or amount > self.free:
            place = (amount, asyncio.get_running_loop().create_future())
            self.waiting.insert(0 if is_next else len(self.waiting), place)
            try:
                await place[1]
            except asyncio.CancelledError:
                if place in self.waiting:
                    self.waiting.remove(place)
                elif not place[1].cancelled():  # else it left the line without the room
                    self.give_back(amount)
                raise
        else:
            self.free -= amount
        try:
            yield
        finally:
            self.give_back(amount)

    def give_back(self, amount: int) -> None:
        self.free += amount
        while self.waiting and (self.waiting[0][1].cancelled() or self.waiting[0][0] <= self.free):
            amount, place = self.waiting.popleft()
            if not place.cancelled():
                self.free -= amount
                place.set_result(None)


class Bodies:
    """Reads and parses the bodies of one server."""

    def __init__(self) -> None:
        self._room = Room(ROOM_BYTES)
        self._decompressed_room = Room(ROOM_BYTES)  # another one, so that nobody who waits for it keeps it taken
        self._parsing = Room(1)
        self._most_values = resolve_int_env_var(LightningEnvVar.AGL_MAX_VALUES, fallback=MOST_VALUES)

    @asynccontextmanager
    async def read(
        self, request: Request, *, max_bytes: int, timeout_seconds: float | None = None, is_json: bool = True
    ) -> AsyncIterator[bytes]:
        """The body of a request, decompressed; it counts as memory in use until the end of the block.

        Args:
            max_bytes: The limit of the body as it is sent, and as it is once decompressed.
            timeout_seconds: As of `Request.body`.
            is_json: Whether its values count, so that one with too many is refused before it has come.
        """
        announced = request.header(b"content-length")
        size = int(announced) if announced.isdigit() else max_bytes
        async with AsyncExitStack() as memory:
            if SMALL_BYTES < size <= max_bytes:
                await memory.enter_async_context(self._room.taken(size))
                request = Request(request.scope, _steady(request.receive, self._room))
            count = None if size <= SMALL_BYTES or request.is_compressed else ValueCount(self._most_values)
            body = await request.body(
                max_bytes=max_bytes,
                timeout_seconds=timeout_seconds,
                check=count.add if is_json and count is not None else None,
            )
            if request.is_compressed:
                try:
                    body = await decompress(body, min(SMALL_BYTES, max_bytes))
                except PayloadTooLarge:
                    await memory.enter_async_context(self._decompressed_room.taken(max_bytes))
                    body = await decompress(body, max_bytes)
            yield body

    async def parse(self, body: bytes, parse: Callable[[bytes], ResultT]) -> ResultT:
        """What `parse` makes of JSON; `PayloadTooLarge` if it holds too many values."""

        def check_and_parse() -> ResultT:
            check_values(body, self._most_values)
            return parse(body)

        if len(body) <= THREAD_FROM_BYTES:
            return check_and_parse()
        async with self._parsing.taken(1):
            return await asyncio.to_thread(check_and_parse)


def _steady(receive: Receive, room: Room) -> Receive:
    """Receive a body that takes room; a slow one is refused while others wait for that room."""
    began, size = time.monotonic(), 0

    async def receive_steadily() -> Message:
        nonlocal size
        while True:
            seconds = time.monotonic() - began
            if seconds > GRACE_SECONDS and room.waiting and size < seconds * SLOWEST_BYTES_PER_SECOND:
                raise RequestTimeout(
                    f"{size} bytes of the request came in {seconds:.0f} s, and others wait for the memory that it "
                    "takes; send it again, faster or in smaller parts."
                )
            with suppress(TimeoutError):
                message = await within(GRACE_SECONDS, receive())
                size += len(message.get("body", b""))
                return message

    return receive_steadily


class ValueCount:
    """Counts the values of JSON that comes in parts, by the marks that stand outside of strings."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values = self._quotes = 0
        self._carried = b""

    def add(self, part: bytes) -> None:
        """Count another part; `PayloadTooLarge` if there are too many values by now."""
        for start in range(0, len(part), _PIECE_BYTES):
            piece = self._carried + part[start : start + _PIECE_BYTES]
            # A backslash at the end of a piece belongs to what the next one begins with.
            self._carried = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
            whole = piece[: len(piece) - len(self._carried)]
            texts = whole.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
            outside = b"".join(texts[self._quotes % 2 :: 2])
            self._values += len(outside) - len(outside.translate(None, _MARKS))
            self._quotes += len(texts) - 1
            if max(self._values, self._quotes // 4) > self._most:
                message = f"The request holds more than {self._most} values; send them in several smaller ones."
                raise PayloadTooLarge(message)


def check_values(body: bytes, most: int = MOST_VALUES) -> None:
    """Refuse JSON with more values than that."""
    # A value takes two bytes at least, with its comma.
    if len(body) > most * 2:
        ValueCount(most).add(body)
