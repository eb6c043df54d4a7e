"""Threads in which plain functions run for an event loop: reused, daemons, and left behind when a function hangs.

The pools of the standard library wait for their threads when the program ends. An agent that hangs must not keep a
program from ending.
"""

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # another one than the builtin in Python 3.10
from typing import Any, Final, TypeVar

__all__ = ["CallingThread", "DaemonThreads", "in_background"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
IDLE_SECONDS: Final = 10.0
"""After which a thread without work ends."""
INTERRUPT_SECONDS: Final = 0.1
"""Between two calls of what interrupts work."""
END_SECONDS: Final = 1.0
"""How long an idle thread is waited for when all are to end."""
_Job = tuple[Callable[[], Any], contextvars.Context, asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class DaemonThreads:
    """Runs each function in an idle thread, or in a new one; any number at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changing = threading.Lock()  # protects the list of idle threads and the count
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._threads: dict[int, threading.Thread] = {}  # by the id of their queue
        self._count = 0
        self._is_closed = False

    def __reduce__(self) -> Any:
        """In another process it has no threads yet."""
        return DaemonThreads, (self._name,)

    async def run(self, function: Callable[[], _T]) -> _T:
        """Call a function in the caller's context; what it raises is raised here. Cancelling leaves it behind."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._a_thread().put((function, contextvars.copy_context(), loop, future))
        return await future

    def close(self) -> None:
        """End the idle threads; busy ones end when their function does."""
        with self._changing:
            self._is_closed = True
            idle, self._idle = self._idle, []
            ending = [thread for jobs in idle if (thread := self._threads.pop(id(jobs), None)) is not None]
        for jobs in idle:
            jobs.put(None)
        for thread in ending:
            thread.join(END_SECONDS)

    def _a_thread(self) -> "queue.SimpleQueue[_Job | None]":
        with self._changing:
            if self._idle:
                return self._idle.pop()
            self._count += 1
            number = self._count
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(jobs,), name=f"{self._name}-{number}", daemon=True)
        with self._changing:
            self._threads[id(jobs)] = thread
        # In an empty context: a thread serves one rollout after the other, and belongs to none.
        contextvars.Context().run(thread.start)
        return jobs

    def _serve(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        while (job := self._next(jobs)) is not None:
            outcome, error = _called(job[0], job[1])
            with self._changing:
                is_closed = self._is_closed
                if not is_closed:
                    self._idle.append(jobs)
            _tell(job, outcome, error)
            del job, outcome, error
            if is_closed:
                self._threads.pop(id(jobs), None)
                return

    def _next(self, jobs: "queue.SimpleQueue[_Job | None]") -> _Job | None:
        """The next job; None if there is none for a while, and the thread is to end."""
        with contextlib.suppress(queue.Empty):
            return jobs.get(timeout=IDLE_SECONDS)
        with self._changing:
            if jobs in self._idle:
                self._idle.remove(jobs)
                self._threads.pop(id(jobs), None)
                return None
        return jobs.get()  # it was just given one


def in_background(name: str, function: Callable[[], _T]) -> "Future[_T]":
    """Call a function in a daemon thread of its own, in the caller's context."""
    future: Future[_T] = Future()

    def call() -> None:
        try:
            outcome = context.run(function)
        except BaseException as error:  # noqa: BLE001 # whatever it is, it is raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(outcome)

    context = contextvars.copy_context()
    threading.Thread(target=call, name=name, daemon=True).start()
    return future


class CallingThread(DaemonThreads):
    """The thread that waits for work in another thread, and runs functions for it meanwhile, one after the other."""

    def __init__(self) -> None:
        super().__init__("calling")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def wait_for(self, work: Callable[[], _T], interrupt: Callable[[], None]) -> _T:
        """Do the work in another thread, in the caller's context; what it raises is raised here.

        Args:
            interrupt: Called after Ctrl-C, again and again until the work ends. No function is run any more then, and
                one that Ctrl-C ended is not answered: the work is to end, not to go on. A second Ctrl-C raises.
        """
        result = in_background("work", work)
        result.add_done_callback(lambda _: self._jobs.put(None))
        is_interrupted = False
        while not result.done():
            try:
                if is_interrupted:
                    interrupt()
                    with contextlib.suppress(FutureTimeout):
                        result.exception(INTERRUPT_SECONDS)
                else:
                    self._run_next()
            except KeyboardInterrupt:
                if is_interrupted:
                    raise
                logger.warning("KeyboardInterrupt received; stopping.")
                is_interrupted = True
        return result.result()

    def close(self) -> None:
        """The thread is the caller's."""

    def _a_thread(self) -> "queue.SimpleQueue[_Job | None]":
        return self._jobs

    def _run_next(self) -> None:
        job = self._jobs.get()
        if job is None or job[-1].done():  # nobody waits any more for one that is done
            return
        outcome, error = _called(job[0], job[1])
        if isinstance(error, KeyboardInterrupt):
            raise error
        _tell(job, outcome, error)


def _called(function: Callable[[], Any], context: contextvars.Context) -> tuple[Any, BaseException | None]:
    """What a function returned, and what it raised. The future is not in reach of the traceback, which it will hold."""
    try:
        return context.run(function), None
    except BaseException as error:  # noqa: BLE001 # whatever it is, it is raised where the function was asked for
        return None, error


def _tell(job: _Job, outcome: Any, error: BaseException | None) -> None:
    _, _, loop, future = job

    def tell() -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(outcome)
        elif isinstance(error, StopIteration):  # which a future does not take
            future.set_exception(RuntimeError(f"The function raised StopIteration: {error}"))
        else:
            future.set_exception(error)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
