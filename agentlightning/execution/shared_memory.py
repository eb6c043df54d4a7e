"""SharedMemoryExecutionStrategy: algorithm and runners as threads of this process, around one store."""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, Literal

from agentlightning.errors import ConfigurationError
from agentlightning.execution.base import (
    AlgorithmBundle,
    ExecutionStrategy,
    OwnsWorker,
    RunnerBundle,
    owned_by,
    resolve_managed_store_flag,
)
from agentlightning.execution.events import ExecutionEvent, ThreadingEvent, run_until_stopped
from agentlightning.execution.watch import PlacedRunners, Watch
from agentlightning.store.base import LightningStore
from agentlightning.store.forwarding import LightningStoreThreaded
from agentlightning.utils.loop_thread import LoopThread

__all__ = ["AGENT_LOOP", "SharedMemoryExecutionStrategy"]

logger = logging.getLogger(__name__)

AGENT_LOOP: ContextVar[LoopThread | None] = ContextVar("agentlightning_agent_loop", default=None)
"""The event loop that asynchronous agents of all runners in this process share.

Frameworks keep asynchronous clients for the whole process, which fail in a second loop.
"""
_Failures = SimpleQueue[BaseException]


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Everything in one process: quick to start, easy to debug, and as parallel as Python's threads are."""

    alias = "shm"

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: Literal["algorithm", "runner"] = "runner",
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
    ) -> None:
        """Nothing runs yet.

        Args:
            n_runners: How many runners, each in a thread of its own; their asynchronous agents share one event loop.
            main_thread: Which side runs in the calling thread, where a debugger is; a runner only if it is alone.
            join_timeout: Seconds to wait for the threads at the end; those that still run then are left behind.
            graceful_delay: Seconds a side has to end by itself once it is told to, and again after it was cancelled.
            poll_interval: Seconds between looks at the stop event.
            managed_store: False hands the store to the threads as it is; None asks AGL_MANAGED_STORE.
        """
        if main_thread not in ("algorithm", "runner"):
            raise ConfigurationError(f"main_thread must be 'algorithm' or 'runner'; it is {main_thread!r}.")
        if n_runners < 1:
            raise ConfigurationError(f"n_runners must be at least 1; it is {n_runners}.")
        if main_thread == "runner" and n_runners != 1:
            raise ConfigurationError(
                f"main_thread='runner' requires n_runners to be 1; it is {n_runners}. Use main_thread='algorithm'."
            )
        self.n_runners = n_runners
        self.main_thread = main_thread
        self.join_timeout = join_timeout
        self.graceful_delay = graceful_delay
        self.poll_interval = poll_interval
        self.managed_store = resolve_managed_store_flag(managed_store)

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run until the algorithm is done; what a thread raised is raised here."""
        shared = LightningStoreThreaded(store) if self.managed_store else store
        stop, failures = ThreadingEvent(), _Failures()
        threads: list[threading.Thread] = []
        agents = LoopThread("agents")
        runners = _RunnerThreads(self.n_runners, owned_by(runner), stop)

        def run_runner(number: int, failures: _Failures | None) -> None:
            try:
                self._run(functools.partial(runner, shared, number, stop), stop, failures)
            finally:
                runners.ended.append(number)

        self.is_interrupted = False
        try:
            if self.main_thread == "algorithm":
                for number in range(self.n_runners):
                    work = functools.partial(run_runner, number, failures)
                    threads.append(_started_thread(f"runner-{number}", work, agents if self.n_runners > 1 else None))
                with _failing_together(stop, None):
                    asyncio.run(self._execute_algorithm(algorithm, shared, runners, stop))
            else:
                work = functools.partial(
                    self._run, lambda: self._execute_algorithm(algorithm, shared, runners, stop), stop, failures
                )
                threads.append(_started_thread("algorithm", work))
                run_runner(0, None)
                # The runner may be done before the algorithm is, which ends by itself.
                threads[0].join()
        except KeyboardInterrupt:
            logger.warning("KeyboardInterrupt received on main thread; stopping all.")
            self.is_interrupted = True
        finally:
            if self.is_interrupted or self.main_thread == "algorithm" or not failures.empty():
                stop.set()
            self._join(threads, agents)
        if not failures.empty() and not self.is_interrupted:
            raise failures.get()

    async def _execute_algorithm(
        self, algorithm: AlgorithmBundle, store: LightningStore, runners: PlacedRunners, stop: ExecutionEvent
    ) -> None:
        try:
            watch = Watch(
                *(algorithm, store, stop, runners), grace_seconds=self.graceful_delay, poll_seconds=self.poll_interval
            )
            async with watch:
                await algorithm(store, stop)
        finally:
            stop.set()  # without an algorithm nobody sends work

    def _join(self, threads: list[threading.Thread], agents: LoopThread) -> None:
        deadline = time.monotonic() + self.join_timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = [thread.name for thread in threads if thread.is_alive()]
        if not agents.stop(max(0.0, deadline - time.monotonic())):
            alive.append("agents")
        if alive:
            logger.error("Threads still run after %g s and are left behind: %s.", self.join_timeout, ", ".join(alive))

    def _run(
        self, work: Callable[[], Coroutine[Any, Any, None]], stop: ExecutionEvent, failures: _Failures | None
    ) -> None:
        """Do one side's work in this thread, in an event loop of its own, to its end or until all is to stop."""
        grace = self.graceful_delay
        with _failing_together(stop, failures):
            asyncio.run(
                run_until_stopped(work(), stop.is_set, grace, abandon_seconds=grace, poll_seconds=self.poll_interval)
            )


class _RunnerThreads(PlacedRunners):
    """Runners that are threads, of which one that fails stops all."""

    def __init__(self, count: int, owns_worker: OwnsWorker, stop: ExecutionEvent) -> None:
        self.ended: list[int] = []  # the numbers of runners
        super().__init__(lambda: len(self.ended) == count, owns_worker)
        self.have_failed = stop.is_set  # type: ignore[method-assign] # the same function, without a frame around it


@contextmanager
def _failing_together(stop: ExecutionEvent, failures: _Failures | None) -> Iterator[None]:
    """Stop all when this thread fails; being cancelled is no failure."""
    try:
        yield
    except asyncio.CancelledError:
        return
    except BaseException as error:
        stop.set()
        if failures is not None:
            failures.put(error)
        raise


def _started_thread(name: str, work: Callable[[], None], agent_loop: LoopThread | None = None) -> threading.Thread:
    def run() -> None:
        AGENT_LOOP.set(agent_loop)
        with suppress(BaseException):  # it is in the queue of failures, and raised by `execute`
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
