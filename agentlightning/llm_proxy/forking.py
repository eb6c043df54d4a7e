"""What a forked child must not take for its own.

A child gets a copy of every open file, and of every object that stands for threads which run in its parent alone. Of
some the copy does harm: a lock would outlive the process that took it, a port would stay taken after its server has
stopped, and an event loop that is cleared away would take the parent's sockets from the parent's loop.
"""

import contextlib
import os
import weakref
from typing import Protocol

from agentlightning.utils.once import fork_handlers, once

__all__ = ["Inheritance", "Running", "inheritance"]


class Running(Protocol):
    """Something that runs in this process."""

    def leave_to_parent(self) -> None:
        """Called in a child: what runs is the parent's."""


class Inheritance:
    """What children are kept from inheriting."""

    def __init__(self) -> None:
        self._files: set[int] = set()
        self._running: weakref.WeakSet[Running] = weakref.WeakSet()
        fork_handlers().add(self, Inheritance._refuse)

    def keep_file(self, file: int) -> None:
        """Close a descriptor in every child; to be called when it was opened."""
        self._files.add(file)

    def release_file(self, file: int) -> None:
        """To be called before it is closed, since its number is given to another file then."""
        self._files.discard(file)

    def keep_running(self, running: Running) -> None:
        """Have it told in every child."""
        self._running.add(running)

    def _refuse(self) -> None:
        while self._files:
            with contextlib.suppress(OSError):
                os.close(self._files.pop())
        for running in list(self._running):
            running.leave_to_parent()


@once
def inheritance() -> Inheritance:
    """That of this process."""
    return Inheritance()
