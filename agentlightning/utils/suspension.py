"""Suspensions: whether this process was stopped for a while, or its clock was set, so that silence proves nothing.

A thread ticks once a second. Ticks that lie far apart by the monotonic clock mean that the process was stopped; a wall
clock that went another way than the monotonic one was set, or the machine slept. Little work is no sign of either.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

TICK_SECONDS: Final = 1.0
GAP_SECONDS: Final = 5.0
"""A busy process ticks late by less than this."""


class Suspensions:
    """Counts the suspensions of this process from `start` on, for as long as somebody wants to know; from any thread.

    Args:
        is_wanted: A method of the owner, which is not kept alive by this.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = weakref.WeakMethod(is_wanted)
        self._last_tick = (0.0, 0.0)  # by the monotonic and the wall clock
        self._count = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Tick from now on; again in a forked process, where the parent's thread is gone."""
        if self._thread is None or not self._thread.is_alive():
            self._last_tick = (time.monotonic(), time.time())
            self._thread = threading.Thread(target=self._run, name="agl-suspensions", daemon=True)
            self._thread.start()

    def count(self) -> int:
        """How many there were; the caller may come before the thread's next tick."""
        (before, wall_before), now, wall = self._last_tick, time.monotonic(), time.time()
        self._last_tick = now, wall
        elapsed = now - before
        if elapsed > GAP_SECONDS or abs(wall - wall_before - elapsed) > GAP_SECONDS:
            self._count += 1
        return self._count

    def _run(self) -> None:
        while (is_wanted := self._is_wanted()) is not None and is_wanted():
            self.count()
            del is_wanted  # its owner may go while this thread sleeps
            time.sleep(TICK_SECONDS)
