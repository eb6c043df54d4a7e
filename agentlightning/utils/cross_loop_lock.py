"""A lock for coroutines of different event loops in different threads."""

import asyncio
import threading
from collections import deque

__all__ = ["CrossLoopLock"]


class CrossLoopLock:
    """Mutual exclusion across loops, first come first served; waiting never blocks a loop's thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # protects the two fields below; held for a few instructions only
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            self._leave_line(turn)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        self._pass_on()

    def _leave_line(self, turn: "asyncio.Future[None]") -> None:
        """The waiter was cancelled; if the lock was handed to it meanwhile, the next in line gets it."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return
        self._pass_on()

    def _pass_on(self) -> None:
        """Hand the lock to the first in line whose loop still lives."""
        while True:
            with self._guard:
                if not self._waiting:
                    self._is_taken = False
                    return
                turn = self._waiting.popleft()
            try:
                turn.get_loop().call_soon_threadsafe(_grant, turn, self)
            except RuntimeError:  # that loop is closed
                continue
            return


def _grant(turn: "asyncio.Future[None]", lock: CrossLoopLock) -> None:
    """Runs in the waiter's loop; a waiter that was cancelled passes the lock on in `_leave_line`."""
    if not turn.done():
        turn.set_result(None)
