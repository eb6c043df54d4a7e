"""Turns: work that comes in a burst is spread over rounds of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

__all__ = ["Turns"]


class Turns:
    """Calls one callback in each round of the loop, in their order.

    When many agents end together, the work of finishing their attempts would fill a single round, and everything else,
    agents that are to begin above all, would wait until the last one is done.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False
        """Whether somebody had this round's turn."""

    def queue(self, callback: Callable[[], None]) -> None:
        """Call it in this round if it is free, or in the next free one."""
        if self._is_taken:
            self._waiting.append(callback)
        else:
            self._give_turn(callback)

    def _give_turn(self, callback: Callable[[], None]) -> None:
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._next)
        callback()

    def _next(self) -> None:
        self._is_taken = False
        if self._waiting:
            self._give_turn(self._waiting.popleft())
