"""What a process has one of, made when it is first needed; and what a forked child must not take for its own."""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class once(Generic[_T]):  # noqa: N801 # used as a decorator
    """Calls a function once, however many threads call it at the same time; `functools.cache` may twice."""

    def __init__(self, make: Callable[[], _T]) -> None:
        functools.update_wrapper(self, make)
        self._make = make
        self._made: list[_T] = []
        self._process_id = os.getpid()
        self._making = threading.RLock()  # held while it is made; a child that is forked meanwhile gets a new one

    def __call__(self) -> _T:
        if not self._made:
            if self._process_id != os.getpid():
                self._process_id, self._making = os.getpid(), threading.RLock()
            with self._making:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]

    def cache_clear(self) -> None:
        """Make it anew the next time."""
        self._made.clear()


class ForkHandlers:
    """Calls a handler of each owner in every forked child, in the order of registration.

    One handler of the operating system stands for all, since those cannot be undone; an owner that is gone has none.
    """

    def __init__(self) -> None:
        self._handlers: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._call)

    def add(self, owner: _T, handler: Callable[[_T], None]) -> None:
        """Call `handler(owner)` in children; the handler must not hold the owner. Replaces one it had."""
        self._handlers[owner] = handler

    def __len__(self) -> int:
        return len(self._handlers)

    def _call(self) -> None:
        for owner, handler in list(self._handlers.items()):
            handler(owner)


@once
def fork_handlers() -> ForkHandlers:
    """Those of this process."""
    return ForkHandlers()
