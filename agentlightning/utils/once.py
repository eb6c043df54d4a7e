"""What a process has one of, made when it is first asked for."""

import functools
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["once"]

_T = TypeVar("_T")


class once(Generic[_T]):  # noqa: N801 # used as a decorator
    """Calls a function once, however many threads ask for its result at the same time; `functools.cache` may twice."""

    def __init__(self, make: Callable[[], _T]) -> None:
        functools.update_wrapper(self, make)
        self._make = make
        self._made: list[_T] = []
        self._making = threading.RLock()  # held while it is made; a child that is forked meanwhile gets a new one
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._unlock)

    def __call__(self) -> _T:
        if not self._made:
            with self._making:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]

    def _unlock(self) -> None:
        self._making = threading.RLock()

    def cache_clear(self) -> None:
        """Make it anew the next time."""
        self._made.clear()
