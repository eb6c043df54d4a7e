"""A program in the foreground: it has our terminal, our process group and our signals, as if a shell had started it.

Where a stream goes to a terminal, the program gets the terminal itself, with its colours and its questions. Any other
stream is handed on as it comes, and kept in bounded memory on the way.
"""

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import Collection
from typing import Any, Final

from agentlightning.utils.child_process import (
    DRAIN_SECONDS,
    KILL_SECONDS,
    STDERR,
    STDOUT,
    CapturedProcess,
    ProgramPlan,
    wait_for_event,
)

_TERMINAL: Final = "/dev/tty"


def streams_to_capture(*, reads_stdout: bool = False) -> set[int]:
    """Which streams are kept: those that are no terminal, and standard output where it is read for a reward."""
    return {number for number in (STDOUT, STDERR) if not os.isatty(number)} | ({STDOUT} if reads_stdout else set())


def has_terminal_signals() -> bool:
    """Whether Ctrl-C reaches our whole process group, and so the program too, without our help."""
    try:
        terminal = os.open(_TERMINAL, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


class ForegroundProgram(CapturedProcess):
    """A running program; what it started is its own affair."""

    @classmethod
    async def start(cls, plan: ProgramPlan, captured: Collection[int]) -> "ForegroundProgram":
        """Run it with our standard input; OSError if it cannot be.

        Args:
            plan: What to run; its `stdin` and `marker` are for programs that run by themselves.
            captured: Which streams are kept and handed on; others are ours.
        """
        pipes: dict[str, Any] = {
            "stdin": None,
            "stdout": asyncio.subprocess.PIPE if STDOUT in captured else None,
            "stderr": asyncio.subprocess.PIPE if STDERR in captured else None,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        _, program = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(captured), *plan.command, cwd=plan.cwd, env=dict(plan.env), **pipes
        )
        return program

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Hand on what is captured."""
        super().pipe_data_received(fd, data)
        try:
            _write(fd, data)
        except OSError:  # our reader has gone: the program is to learn it as it would without us
            pipe = self._transport.get_pipe_transport(fd)
            if pipe is not None:
                pipe.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Harmless if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(number)

    async def end(self, grace_seconds: float) -> None:
        """Read the last output; if the program still runs, ask it to end, and kill it later."""
        try:
            if not self.exited.is_set():
                self.send_signal(signal.SIGTERM)
                await wait_for_event(self.exited, grace_seconds)
            if not self.exited.is_set():
                self.send_signal(signal.SIGKILL)
                await wait_for_event(self.exited, KILL_SECONDS)
            # What a program left in the background may keep its streams open for ever.
            await wait_for_event(self.streams_closed, DRAIN_SECONDS)
        finally:
            self._transport.close()


def _write(fd: int, data: bytes) -> None:
    """All of it, past Python's own buffers; the program waits meanwhile, as it would for a slow terminal."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process has made our stream one that does not wait
            select.select([], [fd], [])
