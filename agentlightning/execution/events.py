"""Stop signals: one side sets them, the other looks."""

import multiprocessing
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Protocol

__all__ = ["ExecutionEvent", "InterruptibleEvent", "MultiprocessingEvent", "Switches", "ThreadingEvent"]

STANDARD_ERROR = 2


class ExecutionEvent(Protocol):
    """A flag that is shared between those who run."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class ThreadingEvent:
    """A flag between threads."""

    __slots__ = ("_evt",)

    def __init__(self) -> None:
        self._evt = threading.Event()

    def set(self) -> None:
        self._evt.set()

    def clear(self) -> None:
        self._evt.clear()

    def is_set(self) -> bool:
        return self._evt.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._evt.wait(timeout)


class MultiprocessingEvent:
    """A flag between processes; it travels to a child when that is started."""

    __slots__ = ("_evt",)

    def __init__(self, *, ctx: BaseContext | None = None) -> None:
        self._evt = (ctx or multiprocessing.get_context()).Event()

    def set(self) -> None:
        self._evt.set()

    def clear(self) -> None:
        self._evt.clear()

    def is_set(self) -> bool:
        return self._evt.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._evt.wait(timeout)


class InterruptibleEvent:
    """A flag that Ctrl-C sets too, for this process alone: what runs may end well. A second Ctrl-C ends it at once."""

    def __init__(self, event: ExecutionEvent, notice: str = "") -> None:
        """What is told of the first Ctrl-C goes to the standard error output."""
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


@dataclass(frozen=True)
class Switches:
    """What a user may turn while a training runs, from any thread; runners in other processes see them too."""

    paused: ExecutionEvent
    stopped: ExecutionEvent
    prepared: ExecutionEvent
    """Set by the algorithm's side when runners may claim."""

    def states(self) -> dict[str, bool]:
        """Which of them are set, by name."""
        return {name: event.is_set() for name, event in vars(self).items()}

    def turn(self, states: Mapping[str, bool]) -> None:
        """Set or clear those that are named."""
        for name, is_set in states.items():
            event: ExecutionEvent = getattr(self, name)
            (event.set if is_set else event.clear)()
