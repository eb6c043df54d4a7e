"""Processes of an execution strategy: started, started again, watched, and their work recovered when they die."""

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

from agentlightning.errors import ConfigurationError, NotAllowed
from agentlightning.execution.base import OwnsWorker, RunnerBundle
from agentlightning.execution.events import ExecutionEvent
from agentlightning.store.base import LightningStore
from agentlightning.store.foreign import end_attempts_of
from agentlightning.utils.child_process import leave_with_parent
from agentlightning.utils.deadline import POLL_SECONDS, until
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 10.0
"""How long a child waits for the parent to acknowledge a restart."""
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


class RestartHandshake:
    """Lets the parent recover the work of a dead runner before the runner is started again.

    The parent cannot tell the lives of one runner apart: if the next began first, its own work would be recovered too.
    """

    def __init__(self, ctx: Any, count: int) -> None:
        self._announced = ctx.SimpleQueue()
        self._acknowledged = [ctx.Semaphore(0) for _ in range(count)]

    def announce(self, number: int, exit_code: int, stop: ExecutionEvent) -> None:
        """In a child: wait until the parent has acknowledged the restart, or is not going to."""
        self._announced.put((number, exit_code))
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while not self._acknowledged[number].acquire(timeout=POLL_SECONDS):
            if stop.is_set() or time.monotonic() > deadline:
                return

    async def acknowledge_all(self, recover: "Callable[[int, int], Coroutine[Any, Any, None]]") -> None:
        """In the parent: recover the work of those that are to be started again, by number and exit code."""
        while not self._announced.empty():
            number, exit_code = self._announced.get()
            await recover(number, exit_code)
            self._acknowledged[number].release()


def restart_on_failure(
    work: Callable[[], None],
    stop: ExecutionEvent,
    handshake: RestartHandshake | None,
    number: int,
    most_restarts: int,
    allowed_exit_codes: Sequence[int],
) -> None:
    """In a child: do the work in a child of its own, and again when that dies. Its last exit code becomes ours.

    The process that starts others again has nothing else to do, so that it can fork without tearing threads apart.
    """
    _end_with_parent(stop, 0.0)
    name = multiprocessing.current_process().name
    for restarts_left in range(most_restarts, -1, -1):
        process = start_process(start_context(), work, name)
        try:
            process.join()
        except KeyboardInterrupt:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            process.join()
        code = process.exitcode
        if code is None or code in allowed_exit_codes or stop.is_set() or restarts_left == 0:
            sys.exit(code if code is None or code >= 0 else SIGNALLED - code)
        if handshake is not None:
            handshake.announce(number, code, stop)
        logger.warning("%s died with exit code %s and is started again; %d more times.", name, code, restarts_left - 1)


# ---------------------------------------------------------------------- watching


def was_killed(process: BaseProcess) -> bool:
    """Whether a signal ended it, or its child (see `restart_on_failure`)."""
    return process.exitcode is not None and (process.exitcode < 0 or process.exitcode > SIGNALLED)


class RunnerProcesses:
    """The runner processes of a strategy; the work of those that die is recovered."""

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        handshake: RestartHandshake,
        runner: RunnerBundle,
        stop: ExecutionEvent,
        allowed_exit_codes: Sequence[int],
    ) -> None:
        self.processes = processes
        self.recovered: list[str] = []
        """Rollouts whose attempts were ended because their runner died."""
        self._allowed = allowed_exit_codes
        self._owns_worker: OwnsWorker | None = getattr(runner, "owns_worker", None)
        self._token: str = getattr(runner, "worker_token", "")
        self._stop = stop
        self._is_dismissed = False
        self._handshake = handshake

    async def until_lost(self, store: LightningStore) -> None:
        """Recover the work of dead runners; returns when the algorithm would wait for runners in vain.

        That is when none is left and one of them died, or when one has failed and set the stop event.
        """
        watched = dict(enumerate(self.processes))

        async def recover(number: int, exit_code: int) -> None:
            if exit_code != 0 and not self._stop.is_set():
                await self._recover(store, number, exit_code)

        while True:
            await self._handshake.acknowledge_all(recover)
            for number in [number for number, process in watched.items() if process.exitcode is not None]:
                await recover(number, watched.pop(number).exitcode or 0)
            if self.has_failed() and not self._is_dismissed and (self.have_ended() or self._stop.is_set()):
                return
            await asyncio.sleep(POLL_SECONDS)

    def have_ended(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    def has_failed(self) -> bool:
        """Whether one ended with an exit code that is not allowed."""
        return any(process.exitcode not in (None, *self._allowed) for process in self.processes)

    async def dismiss(self, timeout_seconds: float) -> None:
        """Stop all, because the algorithm needs them no more, and wait for their end for so long at most."""
        self._is_dismissed = True
        self._stop.set()
        await until(self.have_ended, timeout_seconds=timeout_seconds, interval_seconds=POLL_SECONDS / 4)

    async def recover_killed(self, store: LightningStore) -> None:
        """End the attempts of runners that had to be killed, so that they do not look as if they still ran."""
        for number, process in enumerate(self.processes):
            if process.exitcode:
                await self._recover(store, number, process.exitcode)

    async def _recover(self, store: LightningStore, number: int, exit_code: int) -> None:
        """Nothing is recovered without the ids of the bundle's workers: others may have the same names."""
        if self._owns_worker is None:
            return
        reason = f"process runner-{number} died with exit code {exit_code}"
        with log_failures(logger, "The work of runner-%d could not be recovered.", number):
            is_lost = functools.partial(self._owns_worker, number=number)
            self.recovered += await recover_attempts(store, self._token, is_lost, reason)


async def recover_attempts(store: LightningStore, token: str, is_lost: Callable[[str], bool], reason: str) -> list[str]:
    """End the open attempts of workers that are lost; returns the ids of their rollouts.

    Args:
        token: Part of the ids of all workers among which they are looked for.
        is_lost: Says of an id whether that worker is.
    """
    recovered: list[str] = []
    for worker in await store.query_workers(worker_id_contains=token):
        if not is_lost(worker.worker_id):
            continue
        try:
            recovered += await store.mark_worker_lost(worker.worker_id, reason)
        except NotAllowed:  # a runner's token may only end attempts one by one
            recovered += await end_attempts_of(store, worker.worker_id, reason)
    if recovered:
        logger.warning("Given back, because %s: %s.", reason, ", ".join(recovered))
    return recovered


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], note_interrupt: Callable[[], None]
) -> Iterator[None]:
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
