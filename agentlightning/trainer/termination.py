"""Signals during a training. At SIGTERM everything is stopped, the run is closed, and the program ends.

The handler of SIGTERM must not touch a lock that the interrupted code may hold, so it only hands the news to a thread,
which stops the training as a user would. A program that handles SIGTERM itself is left alone.
"""

import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["EXIT_CODE", "interrupted_by_sigint", "stopped_by_sigterm"]

EXIT_CODE: Final = 128 + signal.SIGTERM
"""What a shell says of a program that SIGTERM ended."""


@contextmanager
def stopped_by_sigterm(stop: Callable[[], None], is_running: Callable[[], bool]) -> Iterator[None]:
    """When SIGTERM comes, call `stop`, in another thread, and exit at the end.

    A second one interrupts the main thread, if the algorithm `is_running` still. Once that has ended, what is left to
    do is to end the runners, which takes a limited time and must not be cut short.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others cannot handle signals
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    news: queue.SimpleQueue[Callable[[], None] | None] = (
        queue.SimpleQueue()
    )  # of which `put` may be interrupted by itself
    count = 0

    def handle(_signal: int, _frame: object) -> None:
        nonlocal count
        count += 1
        news.put(stop)
        if count == 2 and is_running():
            raise KeyboardInterrupt

    def wait() -> None:
        while (action := news.get()) is not None:
            action()

    thread = threading.Thread(target=wait, name="sigterm", daemon=True)
    thread.start()
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except KeyboardInterrupt:
        if not count:
            raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        news.put(None)
        thread.join()
    if count:
        sys.exit(EXIT_CODE)


@contextmanager
def interrupted_by_sigint() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt in a main thread that blocks its event loop.

    The handler of `asyncio.run` cancels the main task instead, which comes to nothing while the task itself blocks. A
    handler of the program's own is left alone.
    """
    before = signal.getsignal(signal.SIGINT)
    is_of_asyncio = getattr(getattr(before, "func", before), "__module__", "").startswith("asyncio")
    if threading.current_thread() is not threading.main_thread() or not is_of_asyncio:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
