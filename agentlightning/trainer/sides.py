"""The two sides of a training, as an execution strategy places them: the algorithm, and each worker."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm import Algorithm
from agentlightning.algorithm.base import INITIAL_RESOURCES_ID
from agentlightning.errors import TrainingError
from agentlightning.execution import ExecutionEvent
from agentlightning.execution.events import Switches
from agentlightning.execution.stranded import until_deserted
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner, Runner
from agentlightning.runner.agent import TOKEN_DIGITS
from agentlightning.runner.failures import FailureLog
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS
from agentlightning.tracer.binding import unobserved
from agentlightning.types import Hook, NamedResources
from agentlightning.types.lifecycle import Component, LifecycleState, lifecycle_of
from agentlightning.types.resources import TrustedTemplates
from agentlightning.utils.daemon_threads import CallingThread, DaemonThreads
from agentlightning.utils.id import generate_id

__all__ = ["AlgorithmSide", "RunnerSide", "Switches"]

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.1
"""How often switches are looked at."""
PREPARED_SECONDS: Final = 0.01
"""How often a runner looks whether it may begin, which delays every training."""


@dataclass
class AlgorithmSide:
    """The algorithm and what it works with."""

    algorithm: Algorithm | None
    trainer: Any
    adapter: TraceAdapter[Any]
    switches: Switches
    train_dataset: Any = None
    val_dataset: Any = None
    initial_resources: NamedResources | None = None
    llm_proxy: Any = None
    on_prepared: Callable[[], Awaitable[None]] | None = None
    """Awaited before runners may claim, after what the algorithm itself does then."""
    was_stopped: bool = False
    """Whether it was ended before it was done."""
    is_over: bool = False
    """Whether it has ended, however it did."""
    is_done: bool = False
    """Whether the algorithm has run to its end, without an error."""
    rollout_failure: TrainingError | None = None
    """Why the run has failed though the algorithm has not: every rollout did."""
    deserted_seconds: float = LOST_WORKER_SECONDS
    """How long rollouts may wait without a sign of life of any worker."""
    _failure: TrainingError | None = None

    def give_up(self, error: TrainingError) -> None:
        """End the algorithm with an error, because what it waits for will not come."""
        self._failure = error

    async def run(self, store: LightningStore, event: ExecutionEvent) -> None:
        """Run the algorithm to its end, or until it is stopped. Its own model calls belong to no rollout."""
        self._bind(store)
        with self._showing_state():
            await self._run(store, event)
            trainer = self.trainer
            if isinstance(trainer, Component) and (failure := lifecycle_of(trainer).failure) is not None:
                raise failure  # somebody called `error`

    @contextmanager
    def _showing_state(self) -> Iterator[None]:
        """The state of the algorithm is that of its run."""
        if self.algorithm is None:
            yield
            return
        life = lifecycle_of(self.algorithm)
        life.become(LifecycleState.RUNNING)
        try:
            yield
        except (asyncio.CancelledError, KeyboardInterrupt):
            life.become(LifecycleState.STOPPED)
            raise
        except BaseException as error:
            life.become(LifecycleState.FAILED, error=error)
            raise
        life.end()

    def _show_pause(self) -> None:
        life = None if self.algorithm is None else lifecycle_of(self.algorithm)
        if life is not None and life.state in (LifecycleState.RUNNING, LifecycleState.PAUSED):
            life.become(LifecycleState.PAUSED if self.switches.paused.is_set() else LifecycleState.RUNNING)

    async def _run(self, store: LightningStore, event: ExecutionEvent) -> None:
        watch = asyncio.create_task(self._watch_workers(store), name="worker-watch")
        try:
            with unobserved():
                work = asyncio.ensure_future(self._work(store, event))
            await self._until_done(work)
        finally:
            self.is_over = True
            watch.cancel()
            await asyncio.wait([watch])
        self.is_done = not self.was_stopped

    def measured(self) -> dict[str, Any]:
        """What the algorithm says of its run, for the summary."""
        try:
            return {} if self.algorithm is None else dict(self.algorithm.run_summary())
        except Exception:  # how the training went matters more
            logger.exception("The algorithm could not sum up its run.")
            return {}

    async def _watch_workers(self, store: LightningStore) -> None:
        """Give up when there is nobody left who could run what is in the queue."""
        error = await until_deserted(store, self.deserted_seconds)
        logger.error("%s", error)
        self.give_up(error)

    def _bind(self, store: LightningStore) -> None:
        if self.llm_proxy is not None:
            self.llm_proxy.set_store(store)
        algorithm = self.algorithm
        if algorithm is None:
            return
        algorithm.set_trainer(self.trainer)
        algorithm.set_store(store)
        algorithm.set_adapter(self.adapter)
        if self.initial_resources is not None:
            algorithm.set_initial_resources(self.initial_resources)
        algorithm.set_llm_proxy(self.llm_proxy)

    async def _work(self, store: LightningStore, event: ExecutionEvent) -> None:
        if self.initial_resources is not None:
            await store.update_resources(INITIAL_RESOURCES_ID, self.initial_resources)
        if self.algorithm is not None:
            await self.algorithm.before_runners()
        if self.on_prepared is not None:
            await self.on_prepared()
        self.switches.prepared.set()
        if self.algorithm is None:
            logger.info("There is no algorithm; runners serve whatever is enqueued, until they are stopped.")
            while not event.is_set():  # noqa: ASYNC110 # the event may be another process's
                await asyncio.sleep(LOOK_SECONDS)
            return
        result = await self._run_algorithm(self.algorithm)
        if inspect.isawaitable(result):
            await result

    async def _run_algorithm(self, algorithm: Algorithm) -> Any:
        """What `run` returns; a plain one is called in a thread, with a store that blocks."""
        datasets = {"train_dataset": self.train_dataset, "val_dataset": self.val_dataset}
        if algorithm.is_async():
            return algorithm.run(**datasets)

        def run() -> Any:
            with algorithm.blocking_store():
                return algorithm.run(**datasets)

        threads = DaemonThreads("algorithm")
        try:
            return await threads.run(run)
        except asyncio.CancelledError:
            algorithm.abandon()
            raise
        finally:
            threads.close()

    async def _until_done(self, work: "asyncio.Future[None]") -> None:
        try:
            while not work.done() and not self.switches.stopped.is_set() and self._failure is None:
                await asyncio.wait([work], timeout=LOOK_SECONDS)
                self._show_pause()
        finally:
            if not work.done():
                self.was_stopped = True
                work.cancel()
                await asyncio.wait([work])
        if self._failure is not None and work.cancelled():
            raise self._failure
        if work.cancelled() and not self.was_stopped:
            raise TrainingError("The algorithm was cancelled from within: something it awaited raised CancelledError.")
        if not work.cancelled():
            work.result()


@dataclass
class RunnerSide:
    """One worker after the other is made from this; it travels to their processes."""

    runner: Runner[Any]
    agent: LitAgent[Any]
    hooks: Sequence[Hook]
    switches: Switches
    options: Mapping[str, Any] = field(default_factory=dict)
    initial_resources: NamedResources | None = None
    """What the program itself gave; its POML templates may be formatted."""
    allow_poml: bool = False
    """Whether any POML template of the store may be."""
    is_alone: bool = False
    """Whether no algorithm runs here, whose end would be theirs too; then a stop is theirs to see."""

    failures: FailureLog = field(default_factory=FailureLog)
    """Logs rollouts that failed, for all workers of a process."""
    thread: CallingThread | None = None
    """Where a plain agent runs, instead of in threads of each worker's own. A stop ends the worker at once then: the
    thread does not come back to it."""
    worker_token: str = field(default_factory=lambda: generate_id(TOKEN_DIGITS))
    """At the end of the ids of this training's workers, and of no others."""

    def owns_worker(self, worker_id: str, number: int | None = None) -> bool:
        """Whether an id is that of a worker of this training, and of this number if one is given."""
        if not isinstance(self.runner, LitAgentRunner) or not worker_id.endswith(f"-{self.worker_token}"):
            return False
        return number is None or worker_id.startswith(f"{self.runner.worker_name_of(number)}@")

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        """Work until the event is set; each worker has a runner and a tracer of its own."""
        runner = copy.copy(self.runner)
        if isinstance(runner, LitAgentRunner):
            runner.set_worker_token(self.worker_token)
            runner.templates = TrustedTemplates(allow_all=self.allow_poml or runner.templates.allow_all)
            runner.templates.add(self.initial_resources)
            runner.failures = self.failures
            if self.thread is not None:
                runner.set_calling_thread(self.thread)
        runner.init(agent=self.agent, hooks=self.hooks)
        try:
            runner.init_worker(worker_id, store)
            task = asyncio.current_task()
            assert task is not None  # we are in a coroutine
            follow = asyncio.create_task(self._follow_switches(runner, event, task), name="switches")
            try:
                await self._until_prepared(event)
                await runner.iter(event=event)
            finally:
                follow.cancel()
                _quietly(lambda: runner.teardown_worker(worker_id), "Error during runner worker teardown")
        finally:
            _quietly(runner.teardown, "Error during runner teardown")

    async def _until_prepared(self, event: ExecutionEvent) -> None:
        """Wait for the algorithm of this training; a runner that is alone cannot see whether there is one."""
        while not (self.is_alone or self.switches.prepared.is_set() or event.is_set()):  # noqa: ASYNC110 # the event may be another process's
            await asyncio.sleep(PREPARED_SECONDS)

    async def _follow_switches(self, runner: Runner[Any], event: ExecutionEvent, task: "asyncio.Task[Any]") -> None:
        """Pause, go on and, if alone or in the calling thread, stop with the training."""
        is_paused = False
        while True:
            if self.is_alone and self.switches.stopped.is_set():
                event.set()
            if self.thread is not None and self.switches.stopped.is_set():
                task.cancel()
                return
            if isinstance(runner, LitAgentRunner) and self.switches.paused.is_set() != is_paused:
                is_paused = not is_paused
                (runner.pause if is_paused else runner.resume)()
            await asyncio.sleep(LOOK_SECONDS)


def _quietly(undo: Any, message: str) -> None:
    try:
        undo()
    except Exception:  # what the worker raised matters more
        logger.exception(message)
