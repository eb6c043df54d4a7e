"""Child processes: started, watched, and ended step by step, so that none is left behind."""

import asyncio
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final, Literal

from agentlightning.errors import ConfigurationError
from agentlightning.execution.events import ExecutionEvent

__all__ = [
    "Death",
    "Deaths",
    "end_with_parent",
    "handling",
    "interrupt",
    "join_until_deadline",
    "run_in_time",
    "run_quietly",
    "signal_processes",
    "start_context",
    "started",
    "was_killed",
    "work_again",
]

logger = logging.getLogger(__name__)

HEARING_SECONDS: Final = 10.0
"""How long a child waits until its parent has heard of a death."""
SIGNALLED: Final = 128
"""Above this, an exit code is that of a process whose child was ended by a signal."""
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Death:
    """A process that is going to be started again."""

    number: int
    exit_code: int


class Deaths:
    """Tells a parent of deaths before the dead are started again.

    The parent cannot tell the lives of one runner apart: if the next began before the parent has given back what the
    dead one was working on, its own work would be given back too.
    """

    def __init__(self, ctx: Any, count: int) -> None:
        self._told = ctx.SimpleQueue()
        self._heard = [ctx.Semaphore(0) for _ in range(count)]

    def tell(self, death: Death, stop: ExecutionEvent) -> None:
        """In a child: returns when the parent has heard, or is not going to."""
        self._told.put(death)
        deadline = time.monotonic() + HEARING_SECONDS
        while not self._heard[death.number].acquire(timeout=_LOOK_SECONDS):
            if stop.is_set() or time.monotonic() > deadline:
                return

    def next(self) -> Death | None:
        """In the parent: what it has not heard of; None if there is nothing."""
        death: Death | None = None if self._told.empty() else self._told.get()
        return death

    def hear(self, death: Death) -> None:
        """In the parent: all that had to be done about a death is done."""
        self._heard[death.number].release()


def start_context(method: Literal["fork", "spawn"] | None = None) -> Any:
    """Fork where there is fork: what runs in the child may be a closure, which no other method can carry."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context(method or ("fork" if "fork" in methods else "spawn"))


def started(ctx: Any, work: Callable[[], None], name: str) -> BaseProcess:
    """A process that does the work."""
    process: BaseProcess = ctx.Process(target=work, name=name)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of threads in a process that forks; what ours hold is put right in the child.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"Process {name} cannot be started with '{ctx.get_start_method()}', because what it is to run cannot be "
            f"pickled ({error}); define the agent and the hooks at the top level of a module, or use "
            "start_method='fork', or the strategy 'shm'."
        ) from error
    return process


def run_quietly(work: Coroutine[Any, Any, None]) -> None:
    """In a child: run to the end. Ctrl-C ends it well; anything else is logged, and the exit code is 1."""
    # What is loaded by now stays: the collector need not look at it again, which would stop all rollouts for as long as
    # fifty of their steps take, and would copy memory that is shared with the parent.
    gc.freeze()
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return
    except Exception:  # the parent sees the exit code, and the reader the log
        logger.exception("Process %s failed.", multiprocessing.current_process().name)
        sys.exit(1)


async def run_in_time(work: Coroutine[Any, Any, None], stop: ExecutionEvent, grace_seconds: float) -> None:
    """Run to the end; once it is told to stop, it has so long to end by itself, and is cancelled then."""
    running, is_late = asyncio.current_task(), False

    async def watch() -> None:
        nonlocal is_late
        while not stop.is_set():  # noqa: ASYNC110 # it may be another process's, or a signal's
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.sleep(grace_seconds)
        logger.warning("The runner did not end within %g s and is interrupted.", grace_seconds)
        is_late = True
        assert running is not None  # we are in a coroutine
        running.cancel()

    watching = asyncio.create_task(watch(), name="grace")
    try:
        await work
    except asyncio.CancelledError:
        if not is_late:
            raise
    finally:
        watching.cancel()


def work_again(
    work: Callable[[], None],
    stop: ExecutionEvent,
    deaths: Deaths | None,
    number: int,
    most_restarts: int,
    allowed_exit_codes: Sequence[int],
) -> None:
    """In a child: do the work in a child of its own, and again when that dies. Its last exit code becomes ours.

    Deaths are told first, if there is somebody who listens. The process that starts others again has nothing else to
    do, so that it can fork without tearing threads apart.
    """
    end_with_parent(stop, 0.0)
    name = multiprocessing.current_process().name
    for restarts_left in range(most_restarts, -1, -1):
        process = started(start_context(), work, name)
        try:
            process.join()
        except KeyboardInterrupt:
            signal_processes([process], interrupt)
            process.join()
        code = process.exitcode
        if code in allowed_exit_codes or stop.is_set() or restarts_left == 0:
            sys.exit(code if code is None or code >= 0 else SIGNALLED - code)
        if deaths is not None and code is not None:
            deaths.tell(Death(number, code), stop)
        logger.warning("%s died with exit code %s and is started again; %d more times.", name, code, restarts_left - 1)


def was_killed(process: BaseProcess) -> bool:
    """Whether a signal ended it, or what it started again and again (see `work_again`)."""
    return process.exitcode is not None and (process.exitcode < 0 or process.exitcode > SIGNALLED)


def join_until_deadline(processes: Sequence[BaseProcess], timeout: float) -> list[BaseProcess]:
    """Wait for all, for so long altogether; returns those that still run."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process for process in processes if process.is_alive()]


def signal_processes(processes: Sequence[BaseProcess], action: Callable[[BaseProcess], None]) -> None:
    """Do something to each; one that has just ended, or refuses, does not keep the others from it."""
    for process in processes:
        try:
            action(process)
        except (OSError, ValueError) as error:
            logger.warning("Process %s could not be signalled: %s", process.name, error)


def interrupt(process: BaseProcess) -> None:
    """As if the user had pressed Ctrl-C in it."""
    if process.pid is not None:
        os.kill(process.pid, signal.SIGINT)


def end_with_parent(stop: ExecutionEvent, patience_seconds: float) -> None:
    """In a child: when the parent is gone, without having told us, end too; first gracefully.

    SIGTERM ends a child at once, whatever a parent that was forked does about its own.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        stop.set()
        time.sleep(patience_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], note_interrupt: Callable[[], None]) -> Iterator[None]:
    """Call the handler at Ctrl-C, which is noted first, and, unless the program handles that itself, at SIGTERM."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            note_interrupt()
        handler(number, frame)

    numbers = [signal.SIGINT]
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        numbers.append(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():  # others cannot handle signals
        numbers = []
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handled_by in before.items():
            signal.signal(number, handled_by)
