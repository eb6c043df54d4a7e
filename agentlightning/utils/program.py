"""A program that is ended as a whole: itself, what it started, and what it left behind.

A `Program` runs in a session and a process group of its own. What left the group is known, on Linux, by an environment
variable it inherited. Should this process be killed, a guard ends the program: a shell that does nothing but wait for
the end of a pipe. Output is read as it comes and kept in bounded memory, so that a program which prints for ever
neither waits nor fills ours.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from agentlightning.utils.heard_program import HeardProgram, Listening, happens

__all__ = ["Program", "ProgramPlan"]

logger = logging.getLogger(__name__)

KILL_SECONDS: Final = 5.0
"""How long a killed program may take to disappear; only one that hangs in the kernel needs it."""
DRAIN_SECONDS: Final = 1.0
"""How long the last output is waited for when everybody who could write is gone."""
LOOK_SECONDS: Final = 0.02
"""Between two looks at what is left: nobody tells us of the end of processes that are not our children."""
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


@dataclass(frozen=True)
class ProgramPlan:
    """What is to be run, and how."""

    command: Sequence[str]
    env: Mapping[str, str]
    marker: str
    """Name of a variable in `env` whose value no other program has."""
    stdin: BinaryIO
    cwd: str | None = None


class Program(HeardProgram):
    """A running program, with all that it started."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, protocol: Listening, mark: str, guard: "_Guard | None"
    ) -> None:
        super().__init__(transport, protocol)
        self._group_id = transport.get_pid()
        self._mark = mark.encode()
        self._guard = guard
        self._is_gone = False

    @classmethod
    async def start(cls, plan: ProgramPlan) -> "Program":
        """Run it; OSError if it cannot be."""
        mark = f"{plan.marker}={plan.env[plan.marker]}"
        starting = asyncio.ensure_future(_launch(plan, mark))
        try:
            transport, protocol, guard = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                transport, protocol, guard = starting.result()
                await cls(transport, protocol, mark, guard).end(grace_seconds=0)
            raise
        return cls(transport, protocol, mark, guard)

    # ------------------------------------------------------------------ ending it

    async def end(self, grace_seconds: float) -> None:
        """End whatever is left, and return when it is gone: asked first, killed later; killed at once if cancelled."""
        try:
            if await self._left():
                self._signal(signal.SIGTERM)
                self._signal(signal.SIGCONT)  # a stopped process would not hear the other signal
                await self._gone(grace_seconds)
            if await self._left():
                await self._killed()
            await happens(self._protocol.silent, DRAIN_SECONDS)
        except asyncio.CancelledError:
            self.kill()
            await self._reaped()
            raise
        finally:
            self.kill()
        await self._reaped()

    def kill(self) -> None:
        """Kill what is left, without waiting for its end."""
        if not self._is_gone:
            self._signal(signal.SIGKILL)
        self._transport.close()
        if self._guard is not None:
            self._guard.dismiss()

    async def _reaped(self) -> None:
        await happens(self._protocol.exited, KILL_SECONDS)
        if self._guard is not None:
            await happens(self._guard.exited, KILL_SECONDS)

    async def _killed(self) -> None:
        until = time.monotonic() + KILL_SECONDS
        while time.monotonic() < until:
            self._signal(signal.SIGKILL)  # again: it may have been forking
            if await self._gone(LOOK_SECONDS):
                return
        logger.warning("Processes %s were killed and are still there.", self._survivors())

    async def _gone(self, patience_seconds: float) -> bool:
        """Whether everything is gone, after waiting for it for a while."""
        until = time.monotonic() + patience_seconds
        while await self._left():
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True

    async def _left(self) -> bool:
        if not self._is_gone and self._protocol.exited.is_set():
            self._is_gone = not await asyncio.to_thread(self._survivors)
        return not self._is_gone

    def _signal(self, number: signal.Signals) -> None:
        for process_id in self._survivors():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, number)

    def _survivors(self) -> set[int]:
        """What signals must be sent to: the group, as a negative number, and what left it; zombies do not count."""
        group = -self._group_id
        if not _PROCESSES.is_dir():
            return {group} if _exists(group) else set()
        found = (self._receiver_for(int(name)) for name in os.listdir(_PROCESSES) if name.isdigit())
        return {receiver for receiver in found if receiver is not None}

    def _receiver_for(self, process_id: int) -> int | None:
        """Of signals to this process; None if it is none of ours. To a group, because it may be forking."""
        folder = _PROCESSES / str(process_id)
        try:
            if os.getpgid(process_id) == self._group_id:
                return -self._group_id if _state_of(folder) not in "ZX" else None
            return process_id if self._mark in (folder / "environ").read_bytes().split(b"\0") else None
        except OSError:  # it has ended, or is somebody else's
            return None


# ---------------------------------------------------------------------- starting


async def _launch(plan: ProgramPlan, mark: str) -> "tuple[asyncio.SubprocessTransport, Listening, _Guard | None]":
    guard = await _Guard.of(mark)  # before the program, so that there is always one
    try:
        transport, protocol = await asyncio.get_running_loop().subprocess_exec(
            Listening,
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
        """Tell it which group to kill."""
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


# ---------------------------------------------------------------------- looking


def _exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _state_of(folder: Path) -> str:
    """One letter, behind the name, which is in brackets and may hold anything."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
