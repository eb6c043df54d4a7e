"""Processes of an execution strategy: started, started again, watched, and their work given back when they die."""

import asyncio
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Final, Literal

from agentlightning.errors import ConfigurationError
from agentlightning.execution.base import RunnerBundle, give_back, owned_by
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.watch import PlacedRunners
from agentlightning.store.base import LightningStore
from agentlightning.utils.child_process import leave_with_parent

logger = logging.getLogger(__name__)

SIGNALLED: Final = 128
"""An exit code above this is that of a process whose child was ended by a signal."""


# ---------------------------------------------------------------------- starting


def start_context(method: Literal["fork", "spawn"] | None = None) -> Any:
    """Fork where there is fork: what runs in the child may be a closure, which no other method can carry."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context(method or ("fork" if "fork" in methods else "spawn"))


def start_process(ctx: Any, work: Callable[[], None], name: str) -> BaseProcess:
    """Do the work in a process; ConfigurationError if it cannot be sent there."""
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
    except RuntimeError as error:
        if ctx.get_start_method() != "spawn" or "bootstrapping" not in str(error):
            raise
        raise ConfigurationError(
            f"Process {name} would run the whole program again; put what starts the training under "
            "`if __name__ == '__main__':`, or use start_method='fork'."
        ) from error
    return process


def run_in_child(
    work: Callable[[ExecutionEvent], Coroutine[object, object, object]], stop: ExecutionEvent, grace: float
) -> None:
    """In a child: run to the end. Ctrl-C ends it well; anything else is logged, and the exit code is 1.

    The child ends at SIGTERM, whatever the parent does about its own, and with the parent, after so many seconds.
    """
    _end_with_parent(stop, grace)
    # What is loaded by now stays: the collector need not look at it again, which would stop all rollouts for as long as
    # fifty of their steps take, and would copy memory that is shared with the parent.
    gc.freeze()
    try:
        asyncio.run(work(stop))
    except KeyboardInterrupt:
        return
    except Exception as error:  # the parent sees the exit code, and the reader the log
        logger.exception("Process %s failed.", multiprocessing.current_process().name)
        raise SystemExit(1) from error


def _end_with_parent(stop: ExecutionEvent, grace: float) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # it may be the parent's handler
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def leave() -> None:
        stop.set()
        time.sleep(grace)

    leave_with_parent(leave)


# ---------------------------------------------------------------------- starting again


def restart_on_failure(
    work: Callable[[int], None],
    stop: ExecutionEvent,
    deaths: Any,
    number: int,
    most_restarts: int,
    allowed_exit_codes: Sequence[int],
) -> None:
    """In a child: do the work in a child of its own, and again when that dies. Its last exit code becomes ours.

    The process that starts others again has nothing else to do, so that it can fork without tearing threads apart.

    Args:
        work: Takes the number of the start, from 0.
        deaths: A queue that gets our number and the exit code before the next start.
    """
    _end_with_parent(stop, 0.0)
    name = multiprocessing.current_process().name
    for start in range(most_restarts + 1):
        process = start_process(start_context(), functools.partial(work, start), name)
        try:
            process.join()
        except KeyboardInterrupt:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            process.join()
        code = process.exitcode
        if code is None or code in allowed_exit_codes or stop.is_set() or start == most_restarts:
            sys.exit(code if code is None or code >= 0 else SIGNALLED - code)
        deaths.put((number, code))
        left = most_restarts - start - 1
        logger.warning("%s died with exit code %s and is started again; %d more times.", name, code, left)


# ---------------------------------------------------------------------- watching


def was_killed(process: BaseProcess) -> bool:
    """Whether a signal ended it, or its child (see `restart_on_failure`)."""
    return process.exitcode is not None and (process.exitcode < 0 or process.exitcode > SIGNALLED)


class RunnerProcesses(PlacedRunners):
    """The runner processes of a strategy; the work of those that die is given back.

    Args:
        deaths: A queue of the number and the exit code of each runner that has died and is started again.
    """

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        deaths: Any,
        runner: RunnerBundle,
        stop: ExecutionEvent,
        allowed_exit_codes: Sequence[int],
    ) -> None:
        super().__init__(lambda: all(process.exitcode is not None for process in processes), owned_by(runner), stop)
        self.processes = processes
        self.recovered: list[str] = []
        """Rollouts whose attempts were ended because their runner died."""
        self._runner = runner
        self._deaths = deaths
        self._starts = dict.fromkeys(range(len(processes)), 0)
        """The latest start of each runner that has not ended, as far as its end was seen."""
        self._allowed = allowed_exit_codes

    def have_failed(self) -> bool:
        """When none is left and one of them died, or when one has failed and set the stop event."""
        has_died = any(process.exitcode not in (None, *self._allowed) for process in self.processes)
        return has_died and (self.have_ended() or super().have_failed())

    async def recover(self, store: LightningStore) -> None:
        while not self._deaths.empty():
            number, exit_code = self._deaths.get()
            await self._give_back(store, number, exit_code)
            self._starts[number] += 1
        for number in [number for number in self._starts if self.processes[number].exitcode is not None]:
            await self._give_back(store, number, self.processes[number].exitcode or 0)
            del self._starts[number]

    async def _give_back(self, store: LightningStore, number: int, exit_code: int) -> None:
        if exit_code != 0:
            reason = f"process runner-{number} died with exit code {exit_code}"
            self.recovered += await give_back(store, self._runner, number, self._starts[number], reason)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], note_interrupt: Callable[[], None]
) -> Iterator[None]:
    """Call the handler at Ctrl-C, which is noted first, and, unless the program handles that itself, at SIGTERM."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            note_interrupt()
        handler(number, frame)

    numbers = {signal.SIGINT} | ({signal.SIGTERM} if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else set())
    is_main = threading.current_thread() is threading.main_thread()  # others cannot handle signals
    before = {number: signal.signal(number, handle) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, handled_by in before.items():
            signal.signal(number, handled_by)
