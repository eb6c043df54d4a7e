"""Child processes that are ended in good time, and that do not outlive the process that started them."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Final

__all__ = ["end_process", "leave_with_parent"]

GRACE_SECONDS: Final = 5.0
"""How long a process may take to end after it was asked to."""


def leave_with_parent() -> None:
    """In a child process: end it at once when its parent is gone, however the parent ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=_leave_after, args=(sentinel,), name="agl-parent-watch", daemon=True).start()


def _leave_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def end_process(process: BaseProcess, grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask a child process to end, kill it if it does not, and wait for it; harmless if it has ended."""
    if process.is_alive():
        process.terminate()
        process.join(grace_seconds)
    if process.is_alive():
        process.kill()
    process.join()
