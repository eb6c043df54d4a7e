"""Flags between those who run: the public events, the stop token of a process, and the flags of a training."""

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Event
from typing import Protocol, TypeVar

from agentlightning.utils.deadline import POLL_SECONDS, until

__all__ = ["ControlFlags", "ExecutionEvent", "MultiprocessingEvent", "StopToken", "ThreadingEvent", "run_until_stopped"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
STANDARD_ERROR = 2


class ExecutionEvent(Protocol):
    """A flag that is shared between those who run."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class ThreadingEvent(threading.Event):
    """A flag between threads."""


class MultiprocessingEvent(Event):
    """A flag between processes; it travels to a child when that is started."""

    def __init__(self, *, ctx: BaseContext | None = None) -> None:
        super().__init__(ctx=ctx or multiprocessing.get_context())


class StopToken:
    """The stop signal of a process: a flag that is shared with others, and that Ctrl-C sets for this process alone.

    The first Ctrl-C lets what runs end well; a second one ends it at once.
    """

    def __init__(self, event: ExecutionEvent, notice: str = "") -> None:
        """The notice is written to standard error at the first Ctrl-C."""
        self._event = event
        self._notice = notice
        self._is_interrupted = False  # not the event itself, whose lock the interrupted code may hold

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._is_interrupted = False
        self._event.clear()

    def is_set(self) -> bool:
        return self._is_interrupted or self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._is_interrupted or self._event.wait(timeout)

    def interrupt(self, _signal: int, _frame: object) -> None:
        """A handler of signals."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True
        if self._notice:
            with suppress(OSError):  # not `print`, which the interrupted code may be in
                os.write(STANDARD_ERROR, f"\n{self._notice}\n".encode())


async def run_until_stopped(
    work: Coroutine[object, object, _T],
    is_stopped: Callable[[], bool],
    grace_seconds: float,
    *,
    abandon_seconds: float | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> _T | None:
    """Run to the end, and return the result; None if the work was cancelled.

    Once it is stopped, the work has `grace_seconds` to end by itself; then it is cancelled, and after
    `abandon_seconds` more it is abandoned.
    """
    task = asyncio.ensure_future(work)
    try:
        if await until(is_stopped, beside=task, interval_seconds=poll_seconds):
            await asyncio.wait([task], timeout=grace_seconds)
            if task.done():
                logger.debug("Bundle finished by itself during grace period.")
            else:
                logger.warning("Graceful delay elapsed; canceling bundle task...")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=abandon_seconds)
    if not task.done():
        logger.error("Bundle task did not stop after cancellation; abandoning task.")
        return None
    return None if task.cancelled() else task.result()


@dataclass(frozen=True)
class ControlFlags:
    """Flags that a user sets while a training runs, from any thread; runners in other processes see them too."""

    paused: ExecutionEvent
    stopped: ExecutionEvent
    prepared: ExecutionEvent
    """Set by the algorithm's role when runners may claim."""

    def states(self) -> dict[str, bool]:
        """Which of them are set, by name."""
        return {name: event.is_set() for name, event in vars(self).items()}

    def apply(self, states: Mapping[str, bool]) -> None:
        """Set or clear those that are named."""
        for name, is_set in states.items():
            event: ExecutionEvent = getattr(self, name)
            (event.set if is_set else event.clear)()
