"""A program that is listened to: its output, as far as it is heard, in bounded memory, and when and how it ended.

Who may end it, and how, is left to the kinds of program.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection
from typing import Final

from agentlightning.utils.clipped_text import ClippedText

__all__ = ["STDERR", "STDOUT", "HeardProgram", "Listening", "happens"]

STDOUT: Final = 1
STDERR: Final = 2


class Listening(asyncio.SubprocessProtocol):
    """Keeps the output of a program, and notes its end.

    Args:
        heard: Which of its streams come to us.
    """

    def __init__(self, heard: Collection[int] = (STDOUT, STDERR)) -> None:
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self.output = {number: ClippedText() for number in heard}
        self.exited = asyncio.Event()
        self.silent = asyncio.Event()
        """Nobody can write to the program's streams any more."""
        self._open_streams = set(heard)
        if not heard:
            self.silent.set()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd].add(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_streams.discard(fd)
        if not self._open_streams:
            self.silent.set()

    def process_exited(self) -> None:
        self.ended_at = time.monotonic()
        self.exited.set()


class HeardProgram:
    """A running program, or one that has ended."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: Listening) -> None:
        self._transport = transport
        self._protocol = protocol

    @property
    def stdout(self) -> ClippedText | None:
        """None if what it writes goes elsewhere; so for the next."""
        return self._protocol.output.get(STDOUT)

    @property
    def stderr(self) -> ClippedText | None:
        return self._protocol.output.get(STDERR)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the negative number of the signal that ended it."""
        return self._transport.get_returncode()

    @property
    def duration_seconds(self) -> float:
        """From its start to its end, or to now."""
        return (self._protocol.ended_at or time.monotonic()) - self._protocol.started_at

    async def wait(self) -> None:
        """Return when the program has ended; what it started may still run."""
        await self._protocol.exited.wait()


async def happens(event: asyncio.Event, patience_seconds: float) -> None:
    """Return when it has happened, or when patience is at its end."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), patience_seconds)
