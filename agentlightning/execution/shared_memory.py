"""SharedMemoryExecutionStrategy: algorithm and runners as threads of this process, around one store."""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, Literal

from agentlightning.errors import ConfigurationError
from agentlightning.execution.base import (
    AlgorithmBundle,
    ExecutionStrategy,
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
        ended: list[int] = []  # the numbers of runners
        runners = PlacedRunners(lambda: len(ended) == self.n_runners, owned_by(runner), stop)

        def run_runner(number: int) -> None:
            try:
                asyncio.run(self._execute_runner(runner(shared, number, stop), stop))
            finally:
                ended.append(number)

        self.is_interrupted = False
        try:
            if self.main_thread == "algorithm":
                agent_loop = agents if self.n_runners > 1 else None
                for number in range(self.n_runners):
                    work = functools.partial(run_runner, number)
                    threads.append(_started_thread(f"runner-{number}", work, stop, failures, agent_loop))
                asyncio.run(self._execute_algorithm(algorithm, shared, runners, stop))
            else:
                side = self._execute_algorithm(algorithm, shared, runners, stop)
                threads.append(_started_thread("algorithm", lambda: asyncio.run(side), stop, failures))
                run_runner(0)
                # The runner may be done before the algorithm is, which ends by itself.
                threads[0].join()
        except KeyboardInterrupt:
            logger.warning("KeyboardInterrupt received on main thread; stopping all.")
            self.is_interrupted = True
            stop.set()
        except BaseException:
            stop.set()
            raise
        finally:
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

    async def _execute_runner(self, work: Coroutine[Any, Any, None], stop: ExecutionEvent) -> None:
        """Work to the end, or until all is to stop."""
        grace = self.graceful_delay
        await run_until_stopped(work, stop.is_set, grace, abandon_seconds=grace, poll_seconds=self.poll_interval)


def _started_thread(
    name: str,
    work: Callable[[], None],
    stop: ExecutionEvent,
    failures: _Failures,
    agent_loop: LoopThread | None = None,
) -> threading.Thread:
    """Work in a thread that stops all when it fails; being cancelled is no failure."""

    def run() -> None:
        AGENT_LOOP.set(agent_loop)
        try:
            work()
        except asyncio.CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 # `execute` raises it
            stop.set()
            failures.put(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
