"""Child processes: started, captured, stopped step by step, and never outliving the process that started them.

- `leave_with_parent` and `end_process`, for processes that `multiprocessing` starts.
- `CapturedProcess`: a program whose output is kept in bounded memory.
- `Program`: one that is ended as a whole, with what it started and what it left behind. It runs in a session and a
  process group of its own; what left the group is known by an environment variable it inherited. Should this process be
  killed, a guard ends the program: a shell that does nothing but wait for the end of a pipe.
"""

import asyncio
import contextlib
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
from typing import Any, BinaryIO, Final

from agentlightning.utils.clipped_text import ClippedText

logger = logging.getLogger(__name__)

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


def python_path() -> str:
    """Where this process finds its packages, so that a child finds the same ones."""
    return os.pathsep.join(place for place in sys.path if place)


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


class CapturedProcess(asyncio.SubprocessProtocol):
    """A running program, or one that has ended; who may end it is left to the subclasses."""

    _transport: asyncio.SubprocessTransport

    def __init__(
        self, captured: Collection[int] = (STDOUT, STDERR), on_error_line: Callable[[str], None] | None = None
    ) -> None:
        """Take what `subprocess_exec` started.

        Args:
            captured: Which of its streams come to us.
            on_error_line: Called with each line of its standard error.
        """
        self.exited = asyncio.Event()
        self.streams_closed = asyncio.Event()
        """Nobody can write to the program's streams any more."""
        output = {number: ClippedText() for number in captured}
        self.stdout, self.stderr = output.get(STDOUT), output.get(STDERR)
        """None if what it writes goes elsewhere."""
        self._output, self._open_streams = output, set(captured)
        self._on_error_line = on_error_line
        self._line = b""
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        if not captured:
            self.streams_closed.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._output[fd].add(data)
        if self._on_error_line is not None and fd == STDERR:
            *lines, self._line = (self._line + data).split(b"\n")
            # A longer line of standard error is cut in two.
            if len(self._line) > 64 * 1024:
                lines, self._line = [*lines, self._line], b""
            for line in lines:
                self._on_error_line(line.decode(errors="replace").rstrip())

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_streams.discard(fd)
        if not self._open_streams:
            self.streams_closed.set()

    def process_exited(self) -> None:
        self._ended_at = time.monotonic()
        self.exited.set()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the negative number of the signal that ended it."""
        return self._transport.get_returncode()

    @property
    def duration_seconds(self) -> float:
        """From its start to its end, or to now."""
        return (self._ended_at or time.monotonic()) - self._started_at

    async def wait(self) -> None:
        """Return when the program has ended; what it started may still run."""
        await self.exited.wait()

    async def end(self, grace_seconds: float) -> None:
        """End it if it still runs: asked first, killed later."""
        raise NotImplementedError


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


class Program(CapturedProcess):
    """A running program, with all that it started."""

    def __init__(self, plan: ProgramPlan, guard: asyncio.subprocess.Process | None) -> None:
        super().__init__(on_error_line=plan.on_error_line)
        self._plan = plan
        self._guard = guard
        self._is_gone = False

    @property
    def process_id(self) -> int:
        """Also that of its group."""
        return self._transport.get_pid()

    @classmethod
    async def start(cls, plan: ProgramPlan) -> "Program":
        """Run it; OSError if it cannot be."""
        starting = asyncio.ensure_future(cls._launch(plan))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                await starting.result().end(grace_seconds=0)
            raise

    @classmethod
    async def _launch(cls, plan: ProgramPlan) -> "Program":
        guard = None if plan.marker is None else await _guard(f"{plan.marker}={plan.env[plan.marker]}")
        try:
            _, program = await asyncio.get_running_loop().subprocess_exec(
                lambda: cls(plan, guard),
                *plan.command,
                stdin=plan.stdin,
                cwd=plan.cwd,
                env=dict(plan.env),
                start_new_session=True,
            )
        except (KeyboardInterrupt, SystemExit):  # it may run already: the guard finds it when this process has ended
            raise
        except BaseException:
            await _dismiss(guard)
            raise
        if guard is not None and guard.stdin is not None:
            guard.stdin.write(f"{program.process_id}\n".encode())
        return program

    async def end(self, grace_seconds: float) -> None:
        """End what is left, and return when it is gone: SIGTERM first, killed later; killed at once if cancelled."""
        try:
            if await self._is_left():
                self._signal(signal.SIGTERM)
                self._signal(signal.SIGCONT)  # a stopped process would not get the other signal
            grace_ends = time.monotonic() + grace_seconds
            given_up = grace_ends + KILL_SECONDS
            while await self._is_left() and (now := time.monotonic()) < given_up:
                if now >= grace_ends:
                    self._signal(signal.SIGKILL)  # again: it may have been forking
                await asyncio.sleep(LOOK_SECONDS)
            if await self._is_left():
                logger.warning("Processes %s were killed and are still there.", self._survivors())
            await wait_for_event(self.streams_closed, DRAIN_SECONDS)
        finally:
            if not self._is_gone:
                self._signal(signal.SIGKILL)
            self._transport.close()
            await wait_for_event(self.exited, KILL_SECONDS)
            await _dismiss(self._guard)

    async def _is_left(self) -> bool:
        if not self._is_gone and self.exited.is_set():
            self._is_gone = not await asyncio.to_thread(self._survivors)
        return not self._is_gone

    def _signal(self, number: signal.Signals) -> None:
        for process_id in self._survivors():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, number)

    def _survivors(self) -> set[int]:
        """What signals must be sent to: the group, as a negative number, and what left it; zombies do not count."""
        import psutil  # here: servers and runners load this module, and most of them start no program

        marker, found = self._plan.marker, set[int]()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is somebody else's
                if os.getpgid(process.pid) == self.process_id:
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.add(-self.process_id)  # the group, because it may be forking
                elif marker is not None and process.environ().get(marker) == self._plan.env[marker]:
                    found.add(process.pid)
        return found


async def _guard(mark: str) -> asyncio.subprocess.Process | None:
    """Kills a program when our end of its standard input is closed, as it is when this process ends."""
    nowhere = asyncio.subprocess.DEVNULL
    streams: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": nowhere, "stderr": nowhere}
    command = ("/bin/sh", "-c", _GUARD, "agl-guard", mark)
    try:
        return await asyncio.create_subprocess_exec(*command, **streams, env={}, cwd="/", start_new_session=True)
    except FileNotFoundError:  # an image without a shell
        return None


async def _dismiss(guard: asyncio.subprocess.Process | None) -> None:
    """Kill the guard, before it can act."""
    if guard is not None:
        with contextlib.suppress(ProcessLookupError):
            guard.kill()
        await guard.wait()
