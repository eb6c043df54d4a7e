"""Threads in which plain functions run for an event loop: reused, daemons, and left behind when a function hangs.

The pools of the standard library wait for their threads when the program ends. An agent that hangs must not keep a
program from ending.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # another one than the builtin in Python 3.10
from dataclasses import dataclass
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
IDLE_SECONDS: Final = 10.0
"""After which a thread without work ends."""


@dataclass
class _Job:
    """A function that a loop waits for."""

    function: Callable[[], Any]
    context: contextvars.Context
    future: "asyncio.Future[Any]"
    outcome: Any = None
    error: BaseException | None = None

    def call(self) -> None:
        try:
            self.outcome = self.context.run(self.function)
        except BaseException as error:  # noqa: BLE001 # whatever it is, it is raised where the function was asked for
            self.error = error

    def settle(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.future.get_loop().call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.future.done():  # nobody waits any more
            return
        if self.error is None:
            self.future.set_result(self.outcome)
        elif isinstance(self.error, StopIteration):  # which a future does not take
            self.future.set_exception(RuntimeError(f"The function raised StopIteration: {self.error}"))
        else:
            self.future.set_exception(self.error)
        self.error = None  # its traceback leads to this job


class DaemonThreads:
    """Runs each function in an idle thread, or in a new one; any number at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changing = threading.Lock()  # protects what follows
        self._idle = 0
        """Threads that wait for a job which nobody has put yet."""
        self._count = 0
        self._is_closed = False

    def __reduce__(self) -> Any:
        """In another process it has no threads yet."""
        return DaemonThreads, (self._name,)

    async def run(self, function: Callable[[], _T]) -> _T:
        """Call a function in the caller's context; what it raises is raised here. Cancelling leaves it behind."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._reserve_thread()
        self._jobs.put(_Job(function, contextvars.copy_context(), future))
        return await future

    def close(self) -> None:
        """End the idle threads; busy ones end when their function does."""
        with self._changing:
            self._is_closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._jobs.put(None)

    def _reserve_thread(self) -> None:
        """See to it that a thread takes the job which is about to be put."""
        with self._changing:
            if self._idle:
                self._idle -= 1
                return
            self._count += 1
            name = f"{self._name}-{self._count}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        # In an empty context: a thread serves one rollout after the other, and belongs to none.
        contextvars.Context().run(thread.start)

    def _serve(self) -> None:
        is_over = False
        while not is_over:
            try:
                job = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._changing:
                    is_over = self._idle > 0  # else one of those who wait is about to get a job
                    self._idle -= is_over
                continue
            if job is None:
                return
            job.call()
            with self._changing:
                is_over = self._is_closed
                self._idle += not is_over
            job.settle()
            del job


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

    def wait_for(self, work: Callable[[], _T], interrupt: Callable[[], None]) -> _T:
        """Do the work in another thread, in the caller's context; what it raises is raised here.

        Args:
            interrupt: Called after Ctrl-C, again and again until the work ends. No function is run any more then, and
                one that Ctrl-C ended is not answered: the work is to end, not to go on. KeyboardInterrupt is raised
                then, or at once after a second Ctrl-C.
        """
        result = in_background("work", work)
        result.add_done_callback(lambda _: self._jobs.put(None))
        is_interrupted = False
        while not result.done():
            try:
                if is_interrupted:
                    interrupt()
                    with contextlib.suppress(FutureTimeout):
                        # Work is interrupted every so often, until it ends.
                        result.exception(0.1)
                    continue
                job = self._jobs.get()
                if job is None or job.future.done():  # nobody waits any more for one that is done
                    continue
                job.call()
                if isinstance(job.error, KeyboardInterrupt):
                    raise job.error
                job.settle()
            except KeyboardInterrupt:
                if is_interrupted:
                    raise
                is_interrupted = True
        if is_interrupted and result.exception() is None:
            raise KeyboardInterrupt
        return result.result()

    def close(self) -> None:
        """The thread is the caller's."""

    def _reserve_thread(self) -> None:
        """It is the one that waits."""
