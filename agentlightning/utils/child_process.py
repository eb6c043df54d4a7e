"""Child processes of ours: they are stopped step by step, and do not outlive the process that started them."""

import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Final

__all__ = ["end_process", "leave_with_parent"]

GRACE_SECONDS: Final = 5.0
"""How long a process may take to end after SIGTERM."""
WATCH_SECONDS: Final = 0.5
"""Between two looks at a parent that is known by its id."""


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
