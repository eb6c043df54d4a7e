"""Child processes: started, captured, stopped step by step, and never outliving the process that started them.

- Functions for processes that `multiprocessing` starts.
- `CapturedProcess`: a program whose output is kept in bounded memory.
- `Program`: one that is ended as a whole, with what it started and what it left behind. It runs in a session and a
  process group of its own. What left the group is known, on Linux, by an environment variable it inherited. Should this
  process be killed, a guard ends the program: a shell that does nothing but wait for the end of a pipe.
- `BackgroundProgram`: the same for code without an event loop.
"""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO, Final

from agentlightning.utils.clipped_text import ClippedText
from agentlightning.utils.loop_thread import LoopThread

__all__ = [
    "STDERR",
    "STDOUT",
    "BackgroundProgram",
    "CapturedProcess",
    "OutputCapture",
    "Program",
    "ProgramPlan",
    "calm_collector",
    "end_process",
    "leave_with_parent",
    "python_path",
    "wait_for_event",
]

logger = logging.getLogger(__name__)

CALM_THRESHOLDS: Final = (10_000, 20, 50)
"""Of the garbage collector."""
STDOUT: Final = 1
STDERR: Final = 2
GRACE_SECONDS: Final = 5.0
"""How long a process may take to end after SIGTERM."""
WATCH_SECONDS: Final = 0.5
"""Between two looks at a parent that is known by its id."""
KILL_SECONDS: Final = 5.0
"""How long a killed program may take to disappear; only one that hangs in the kernel needs it."""
DRAIN_SECONDS: Final = 1.0
"""How long the last output is waited for when everybody who could write is gone."""
LOOK_SECONDS: Final = 0.02
"""Between two looks at what is left: the end of processes that are not our children can only be polled."""
LONGEST_LINE_BYTES: Final = 64 * 1024
"""After which a line of standard error is cut in two."""
_GUARD: Final = """
read -r group; read -r end
[ -n "$group" ] && kill -KILL -- "-$group"
for look in 1 2 3; do
    for file in /proc/[0-9]*/environ; do
        grep -qF -- "$1" "$file" && id=${file#/proc/} && kill -KILL "${id%/environ}"
    done
    sleep 0.1
done
"""
"""Gets the group as soon as there is one; looks several times, because a program may be about to start when we end."""
_PROCESSES: Final = Path("/proc")


def python_path() -> str:
    """Where this process finds its packages, so that a child finds the same ones."""
    return os.pathsep.join(place for place in sys.path if place)


def calm_collector() -> None:
    """In a process of our own that serves: let the garbage collector run more rarely, unless it is rarer or off.

    Decoding requests makes many small objects at once, most of which stay or go without any help. With Python's usual
    thresholds the collector looks through them every few requests, which costs a busy server a fifth of its time.
    """
    if 0 < gc.get_threshold()[0] < CALM_THRESHOLDS[0]:
        gc.set_threshold(*CALM_THRESHOLDS)


# ---------------------------------------------------------------------- processes of multiprocessing


def leave_with_parent(
    before_exit: Callable[[], None] | None = None, *, is_orphaned: Callable[[], bool] | None = None
) -> None:
    """In a child process: exit when the parent is gone, however it ended.

    Args:
        before_exit: Called first, in a thread of its own; it may give running work time to end.
        is_orphaned: Says whether the parent is gone, for a child that `multiprocessing` did not start. A pipe would not
            do: what else the parent forks inherits it and keeps it open.
    """
    parent = multiprocessing.parent_process()
    if parent is None and is_orphaned is None:
        return

    def watch() -> None:
        if is_orphaned is not None:
            while not is_orphaned():
                time.sleep(WATCH_SECONDS)
        elif parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
        if before_exit is not None:
            before_exit()
        os._exit(1)

    threading.Thread(target=watch, name="agl-parent-watch", daemon=True).start()


def end_process(process: BaseProcess, grace_seconds: float = GRACE_SECONDS) -> None:
    """Terminate a child process, kill it if it does not end in time, and wait for it; harmless if it has ended."""
    if process.is_alive():
        process.terminate()
        process.join(grace_seconds)
    if process.is_alive():
        process.kill()
    process.join()


# ---------------------------------------------------------------------- programs


class OutputCapture(asyncio.SubprocessProtocol):
    """Keeps the output of a program, and notes its end.

    Args:
        captured: Which of its streams come to us.
        on_error_line: Called with each line of its standard error.
    """

    def __init__(
        self, captured: Collection[int] = (STDOUT, STDERR), on_error_line: Callable[[str], None] | None = None
    ) -> None:
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self.output = {number: ClippedText() for number in captured}
        self.exited = asyncio.Event()
        self.streams_closed = asyncio.Event()
        """Nobody can write to the program's streams any more."""
        self._open_streams = set(captured)
        self._on_error_line = on_error_line
        self._line = b""
        if not captured:
            self.streams_closed.set()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd].add(data)
        if self._on_error_line is not None and fd == STDERR:
            *lines, self._line = (self._line + data).split(b"\n")
            if len(self._line) > LONGEST_LINE_BYTES:
                lines, self._line = [*lines, self._line], b""
            for line in lines:
                self._on_error_line(line.decode(errors="replace").rstrip())

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_streams.discard(fd)
        if not self._open_streams:
            self.streams_closed.set()

    def process_exited(self) -> None:
        self.ended_at = time.monotonic()
        self.exited.set()


class CapturedProcess:
    """A running program, or one that has ended; who may end it is left to the subclasses."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: OutputCapture) -> None:
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


async def wait_for_event(event: asyncio.Event, timeout_seconds: float) -> None:
    """Return when the event is set, or when the time is up."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_seconds)


@dataclass(frozen=True)
class ProgramPlan:
    """What is to be run, and how."""

    command: Sequence[str]
    env: Mapping[str, str]
    marker: str | None
    """Name of a variable in `env` whose value no other program has; None for a program that starts no others, and that
    leaves with its parent by itself."""
    stdin: BinaryIO
    cwd: str | None = None
    on_error_line: Callable[[str], None] | None = None
    """Called with each line of its standard error."""

    @property
    def mark(self) -> str | None:
        return None if self.marker is None else f"{self.marker}={self.env[self.marker]}"


class Program(CapturedProcess):
    """A running program, with all that it started."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        protocol: OutputCapture,
        mark: str | None,
        guard: "_Guard | None",
    ) -> None:
        super().__init__(transport, protocol)
        self.process_id = transport.get_pid()
        """Also that of its group."""
        self._mark = None if mark is None else mark.encode()
        self._guard = guard
        self._is_gone = False

    @classmethod
    async def start(cls, plan: ProgramPlan) -> "Program":
        """Run it; OSError if it cannot be."""
        starting = asyncio.ensure_future(_launch(plan))
        try:
            transport, protocol, guard = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                transport, protocol, guard = starting.result()
                await cls(transport, protocol, plan.mark, guard).end(grace_seconds=0)
            raise
        return cls(transport, protocol, plan.mark, guard)

    # ------------------------------------------------------------------ ending it

    async def end(self, grace_seconds: float) -> None:
        """End what is left, and return when it is gone: SIGTERM first, killed later; killed at once if cancelled."""
        try:
            if await self._is_left():
                self._signal(signal.SIGTERM)
                self._signal(signal.SIGCONT)  # a stopped process would not get the other signal
                await self._gone(grace_seconds)
            if await self._is_left():
                await self._killed()
            await wait_for_event(self._protocol.streams_closed, DRAIN_SECONDS)
        finally:
            self.kill()
            await wait_for_event(self._protocol.exited, KILL_SECONDS)
            if self._guard is not None:
                await wait_for_event(self._guard.exited, KILL_SECONDS)

    def kill(self) -> None:
        """Kill what is left, without waiting for its end."""
        if not self._is_gone:
            self._signal(signal.SIGKILL)
        self._transport.close()
        if self._guard is not None:
            self._guard.dismiss()

    async def _killed(self) -> None:
        until = time.monotonic() + KILL_SECONDS
        while time.monotonic() < until:
            self._signal(signal.SIGKILL)  # again: it may have been forking
            if await self._gone(LOOK_SECONDS):
                return
        logger.warning("Processes %s were killed and are still there.", self._survivors())

    async def _gone(self, timeout_seconds: float) -> bool:
        """Whether everything is gone, after waiting for it for a while."""
        until = time.monotonic() + timeout_seconds
        while await self._is_left():
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True

    async def _is_left(self) -> bool:
        if not self._is_gone and self._protocol.exited.is_set():
            self._is_gone = not await asyncio.to_thread(self._survivors)
        return not self._is_gone

    def _signal(self, number: signal.Signals) -> None:
        for process_id in self._survivors():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, number)

    def _survivors(self) -> set[int]:
        """What signals must be sent to: the group, as a negative number, and what left it; zombies do not count."""
        group = -self.process_id
        if not _PROCESSES.is_dir():
            with contextlib.suppress(ProcessLookupError):
                with contextlib.suppress(PermissionError):
                    os.kill(group, 0)
                return {group}
            return set()
        found = (self._receiver_for(int(name)) for name in os.listdir(_PROCESSES) if name.isdigit())
        return {receiver for receiver in found if receiver is not None}

    def _receiver_for(self, process_id: int) -> int | None:
        """Of signals to this process; None if it is none of ours. To a group, because it may be forking."""
        folder = _PROCESSES / str(process_id)
        try:
            if os.getpgid(process_id) == self.process_id:
                # The state is one letter behind the name, which is in brackets and may hold anything.
                state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
                return -self.process_id if state not in "ZX" else None
            is_marked = self._mark is not None and self._mark in (folder / "environ").read_bytes().split(b"\0")
            return process_id if is_marked else None
        except OSError:  # it has ended, or is somebody else's
            return None


async def _launch(plan: ProgramPlan) -> "tuple[asyncio.SubprocessTransport, OutputCapture, _Guard | None]":
    guard = None if plan.mark is None else await _Guard.of(plan.mark)  # before the program: there is always one
    try:
        transport, protocol = await asyncio.get_running_loop().subprocess_exec(
            lambda: OutputCapture(on_error_line=plan.on_error_line),
            *plan.command,
            stdin=plan.stdin,
            cwd=plan.cwd,
            env=dict(plan.env),
            start_new_session=True,
        )
    except BaseException:
        if guard is not None:
            guard.dismiss()
            await guard.exited.wait()
        raise
    if guard is not None:
        guard.watch(transport.get_pid())
    return transport, protocol, guard


class _Guard(asyncio.SubprocessProtocol):
    """Kills a program when our end of its standard input is closed, as it is when this process ends."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def of(cls, mark: str) -> "_Guard | None":
        try:
            transport, guard = await asyncio.get_running_loop().subprocess_exec(
                *(cls, "/bin/sh", "-c", _GUARD, "agl-guard", mark),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except FileNotFoundError:  # an image without a shell
            return None
        guard._transport = transport
        return guard

    def watch(self, group_id: int) -> None:
        """Send it the group to kill."""
        stdin = None if self._transport is None else self._transport.get_pipe_transport(0)
        if isinstance(stdin, asyncio.WriteTransport):
            stdin.write(f"{group_id}\n".encode())

    def process_exited(self) -> None:
        self.exited.set()
        if self._transport is not None:
            self._transport.close()

    def dismiss(self) -> None:
        """Kill it, before it can act."""
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()


class BackgroundProgram:
    """A program for code without an event loop: its output is read in a thread. `start` it and `stop` it."""

    def __init__(self, name: str) -> None:
        self._thread = LoopThread(name)
        self._program: Program | None = None

    def start(self, plan: ProgramPlan) -> None:
        """Run it; OSError if it cannot be."""
        self._program = self._thread.run(Program.start(plan))

    def stop(self, grace_seconds: float) -> None:
        """End it with all that it started; harmless if nothing runs."""
        program, self._program = self._program, None
        if program is not None:
            self._thread.run(program.end(grace_seconds))
        self._thread.stop()

    @property
    def process_id(self) -> int | None:
        """None if there is none."""
        return None if self._program is None else self._program.process_id

    @property
    def exit_code(self) -> int | None:
        return None if self._program is None else self._program.exit_code

    def is_running(self) -> bool:
        return self._program is not None and self._program.exit_code is None

    def has_ended(self, timeout_seconds: float) -> bool:
        """Whether it has ended, after waiting for that, and for its last output, for a while."""
        if self._program is not None:
            protocol = self._program._protocol
            self._thread.run(wait_for_event(protocol.exited, timeout_seconds))
            if protocol.exited.is_set():
                self._thread.run(wait_for_event(protocol.streams_closed, DRAIN_SECONDS))
        return not self.is_running()

    def output(self) -> str:
        """The beginning of its standard output."""
        found = None if self._program is None else self._program.stdout
        return "" if found is None else found.text()

    def last_lines(self, count: int, secrets: tuple[str, ...] = ()) -> list[str]:
        """Of its standard error, without secrets."""
        found = None if self._program is None else self._program.stderr
        return [] if found is None else found.end(secrets).splitlines()[-count:]
