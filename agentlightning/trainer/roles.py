"""The two roles of a training, as an execution strategy places them: the algorithm, and each worker."""

import asyncio
import copy
import dataclasses
import inspect
import logging
import os
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from agentlightning.algorithm import Algorithm
from agentlightning.algorithm.base import INITIAL_RESOURCES_ID
from agentlightning.algorithm.fast import FastAlgorithm
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.execution import ExecutionEvent
from agentlightning.execution.events import ControlFlags
from agentlightning.execution.shared_memory import AGENT_LOOP
from agentlightning.litagent import LitAgent
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner, Runner
from agentlightning.runner.agent import TOKEN_DIGITS
from agentlightning.runner.failures import FailureLog
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.lifecycle import RUN_REPORTS
from agentlightning.tracer.binding import unobserved
from agentlightning.trainer.components import store_address
from agentlightning.trainer.console import Console
from agentlightning.trainer.outcomes import DevRun, failure_of_all
from agentlightning.trainer.run_config import git_revision, run_config
from agentlightning.trainer.views import view_for
from agentlightning.types import Hook, NamedResources, ProxyLLM, Resource, Run, RunStatus
from agentlightning.types.lifecycle import Component, lifecycle_of
from agentlightning.types.records import CURRENT_RUN
from agentlightning.types.resources import TrustedTemplates
from agentlightning.utils.daemon_threads import CallingThread, DaemonThreads
from agentlightning.utils.deadline import POLL_SECONDS, until
from agentlightning.utils.id import generate_id, worker_id
from agentlightning.utils.log_failures import ANNOUNCE, log_failures, repeat
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.verdict import verdict_of_run

logger = logging.getLogger(__name__)

PREPARED_SECONDS: Final = 0.01
"""How often a runner looks whether it may begin, which delays every training."""
REPORT_SECONDS: Final = 30.0
"""Between two reports of a training to its run."""
VERDICT_SECONDS: Final = 30.0
"""How long reading a run for its verdict may take."""


@dataclass
class AlgorithmRole:
    """The algorithm of a trainer, and its run in the store."""

    algorithm: Algorithm | None
    trainer: Any
    flags: ControlFlags
    train_dataset: Any = None
    val_dataset: Any = None
    dev: DevRun | None = None
    """Set if the agent is only tried."""
    on_prepared: Callable[[], Awaitable[None]] | None = None
    """Awaited before runners may claim, after what the algorithm itself does then."""
    was_stopped: bool = False
    """Whether it was ended before it was done."""
    is_over: bool = False
    """Whether it has ended, however it did."""
    run_id: str | None = None
    """Of its run, once that has begun."""
    is_done: bool = False
    """Whether the algorithm has run to its end, without an error."""
    rollout_failure: TrainingError | None = None
    """Why the run has failed though the algorithm has not: every rollout did."""
    _failure: TrainingError | None = None

    def give_up(self, error: TrainingError) -> None:
        """End the algorithm with an error, because what it waits for will not come."""
        self._failure = error

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None:
        """Run the algorithm to its end, or until it is stopped. Its own model calls belong to no rollout."""
        async with self._recorded(store):
            self._bind(store)
            try:
                with unobserved():
                    for begin in (self._prepare, self._started):
                        work: asyncio.Future[object] = asyncio.ensure_future(begin(store, event))
                        if await self._is_done_before_stop(work):
                            work.result()
            finally:
                self.is_over = True
            self.is_done = not self.was_stopped
            trainer = self.trainer
            if isinstance(trainer, Component) and (failure := lifecycle_of(trainer).failure) is not None:
                raise failure  # somebody called `error`

    # ------------------------------------------------------------------ the algorithm

    def _bind(self, store: LightningStore) -> None:
        trainer, algorithm = self.trainer, self.algorithm
        if trainer.llm_proxy is not None:
            trainer.llm_proxy.set_store(store)
        if algorithm is None:
            return
        algorithm.set_trainer(trainer)
        algorithm.set_store(store)
        algorithm.set_adapter(trainer.adapter)
        if trainer.initial_resources is not None:
            algorithm.set_initial_resources(trainer.initial_resources)
        algorithm.set_llm_proxy(trainer.llm_proxy)

    async def _prepare(self, store: LightningStore, _: ExecutionEvent) -> None:
        await self._retire_models(store)
        if self.trainer.initial_resources is not None:
            await store.update_resources(INITIAL_RESOURCES_ID, self.trainer.initial_resources)
        if self.algorithm is not None:
            await self.algorithm.before_runners()
        if self.on_prepared is not None:
            await self.on_prepared()
        self.flags.prepared.set()

    def _started(self, _: LightningStore, event: ExecutionEvent) -> Awaitable[object]:
        """What runs the algorithm; without one, runners serve whatever is enqueued."""
        algorithm = self.algorithm
        if self.was_stopped:
            return asyncio.sleep(0)
        if algorithm is None:
            logger.info("There is no algorithm; runners serve whatever is enqueued, until they are stopped.")
            return until(event.is_set)
        if not algorithm.is_async():
            return self._run_in_thread(algorithm)
        running = algorithm.run(train_dataset=self.train_dataset, val_dataset=self.val_dataset)
        return running if inspect.isawaitable(running) else asyncio.sleep(0)

    async def _run_in_thread(self, algorithm: Algorithm) -> None:
        """Call a plain `run` in a thread, with a store that blocks."""

        def run() -> object:
            with algorithm.blocking_store():
                return algorithm.run(train_dataset=self.train_dataset, val_dataset=self.val_dataset)

        threads = DaemonThreads("algorithm")
        try:
            result = await threads.run(run)
        except asyncio.CancelledError:
            algorithm.abandon()
            raise
        finally:
            threads.close()
        if inspect.isawaitable(result):
            await result

    async def _is_done_before_stop(self, work: "asyncio.Future[object]") -> bool:
        """Wait for a part of the work; cancel it when the training is stopped or given up, which is raised."""

        def is_ended() -> bool:
            return self.flags.stopped.is_set() or self._failure is not None

        try:
            await until(is_ended, beside=work)
        finally:
            if not work.done():
                self.was_stopped = True
                work.cancel()
                await asyncio.wait([work])
        if self._failure is not None and work.cancelled():
            raise self._failure
        if work.cancelled() and not self.was_stopped:
            raise TrainingError("The algorithm was cancelled from within: something it awaited raised CancelledError.")
        return not work.cancelled()

    # ------------------------------------------------------------------ its run

    @asynccontextmanager
    async def _recorded(self, store: LightningStore) -> AsyncIterator[None]:
        """Record what happens within as a run in the store, and show it.

        That every rollout failed is the cause of an error that has no other, or else the failure of the run.
        """
        trainer, dev = self.trainer, self.dev
        run = await self._open_run(store)
        self.run_id = run.run_id
        if self.algorithm is not None:
            self.algorithm.set_run_id(run.run_id)
        console = Console(
            view_for(trainer.progress if dev is None else dev.live_progress, trainer.name),
            store,
            address=store_address(trainer.store),
            run_id=run.run_id,
            counts_all=self.algorithm is None,
            served_at=store.endpoint if isinstance(store, LightningStoreServer) else None,
        )
        status: RunStatus = "failed"
        summary: dict[str, object] = {}
        began = time.monotonic()
        before, shown = (
            CURRENT_RUN.set(run.run_id),
            ANNOUNCE.set(console.announce if console.view is not None else None),
        )
        try:
            with _reports(store, trainer.name, run.run_id):
                async with console:
                    try:
                        yield
                    except Exception as error:
                        failure, unread = None, "Whether rollouts have failed could not be read"
                        with log_failures(logger, unread, level=logging.WARNING):  # the error matters more
                            failure = await failure_of_all(store, run)
                        if failure is not None and error.__cause__ is None and error.__context__ is None:
                            raise error from failure
                        raise
                    finally:
                        if dev is not None:
                            await dev.read(store, run)
                    if self.is_done and self.algorithm is not None:
                        self.rollout_failure = await failure_of_all(store, run)
                    status = "stopped" if self.was_stopped else "succeeded"
                    summary = {**({} if dev is None else dev.summary()), **await console.summary()}
                    if self.rollout_failure is not None:
                        raise self.rollout_failure
        except BaseException as error:
            status = "stopped" if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
            summary = {**summary, "error": f"{type(error).__name__}: {error}"}
            if isinstance(error, Exception) and error is not self.rollout_failure:
                logger.error("The algorithm failed: %s: %s", type(error).__name__, error)  # it is raised
            raise
        finally:
            CURRENT_RUN.reset(before)
            ANNOUNCE.reset(shown)
            with log_failures(logger, "The algorithm could not sum up its run."):
                summary = {**({} if self.algorithm is None else self.algorithm.run_summary()), **summary}
            summary["seconds"] = round(time.monotonic() - began, 3)
            ended = run.model_copy(update={"summary": summary, "status": status})
            await asyncio.shield(self._close_run(store, ended, console))

    async def _close_run(self, store: LightningStore, run: Run, console: Console) -> None:
        """Close a run with the verdict on it, which is said too; without one, if there is nothing to judge."""
        verdict = None
        if self.algorithm is not None and self.dev is None and not isinstance(self.algorithm, FastAlgorithm):
            with log_failures(logger, "There is no verdict on run '%s'.", run.run_id):
                verdict = await asyncio.wait_for(verdict_of_run(store, run), VERDICT_SECONDS)
                console.conclude(verdict)
        with log_failures(logger, "The models of run '%s' are still among the latest resources.", run.run_id):
            await self._retire_models(store, run.run_id)
        await self._warn_of_others(store, run.start_time, run.run_id)
        judged = {} if verdict is None else {"verdict": verdict.as_summary()}
        await store.finish_run(run.run_id, run.status, summary={**run.summary, **judged})
        if run.status == "stopped" and self.algorithm is not None and (hint := self.algorithm.resume_hint()):
            logger.warning("%s", hint)

    async def _retire_models(self, store: LightningStore, run_id: str | None = None) -> None:
        """Publish the latest resources without models that have ended with a run, lest agents be sent to them.

        Args:
            run_id: The run that ends; what it served gives way to what the user gave. None for all runs before this
                one, which may have been killed before they could do it.
        """
        proxy, initial = self.trainer.llm_proxy, {} if run_id is None else self.trainer.initial_resources or {}
        is_over = run_id is not None and isinstance(proxy, LLMProxy) and proxy.port and not proxy.is_running()
        stopped = proxy.endpoint if is_over else None

        def has_ended(resource: Resource) -> bool:
            if not isinstance(resource, ProxyLLM):
                return False
            is_served = resource.run_id is not None and run_id in (resource.run_id, None)
            return is_served or resource.get_base_url(None, None) == stopped

        latest = await store.get_latest_resources()
        if latest is not None and any(map(has_ended, latest.resources.values())):
            both = (*initial.items(), *latest.resources.items())
            await store.add_resources({name: resource for name, resource in both if not has_ended(resource)})

    async def _open_run(self, store: LightningStore) -> Run:
        trainer = self.trainer
        strategy = trainer.strategy if self.dev is None else self.dev.strategy
        names = ("adapter", "tracer", "runner", "llm_proxy")
        parts = {"algorithm": self.algorithm, "strategy": strategy, **{name: getattr(trainer, name) for name in names}}
        counts = {
            "n_runners": trainer.n_runners if self.dev is None else strategy.n_runners,
            "max_rollouts": trainer.max_rollouts,
            "n_train": None if self.train_dataset is None else len(self.train_dataset),
            "n_val": None if self.val_dataset is None else len(self.val_dataset),
        }
        await self._refuse_others(store)
        return await store.start_run(
            trainer.name,
            config=run_config(parts, counts, await asyncio.to_thread(git_revision)),
            metadata={RUN_REPORTS: {"interval_seconds": REPORT_SECONDS, "process": _this_process()}},
        )

    async def _refuse_others(self, store: LightningStore) -> None:
        """ConfigurationError if another process of this machine trains in this store; others are named."""
        others = await self._warn_of_others(store, time.time() - 2 * REPORT_SECONDS)
        for run in filter(_is_at_work, others):
            pid = run.metadata[RUN_REPORTS]["process"]["pid"]
            raise ConfigurationError(
                f"Run '{run.run_id}' is under way in this store, in process {pid}: runners would take rollouts of each "
                "other. Give this training a store of its own, or wait for the end of the other."
            )

    async def _warn_of_others(self, store: LightningStore, since: float, own: str | None = None) -> list[Run]:
        """Name other trainings of the store: runners take what is next in its queue, of whichever.

        Args:
            since: Those that were seen after this time.
            own: The id of the run that ends; before it begins, only those are named that have not ended.
        """
        others: list[Run] = []
        if self.dev is None and getattr(self.trainer.strategy, "role", "both") != "both":
            return others  # runners that were started by hand may be there for several
        with log_failures(logger, "Whether others train in this store could not be read", level=logging.WARNING):
            for run in await store.query_runs(status_in=["running"] if own is None else None):
                seen = run.metadata.get(RUN_REPORTS, {}).get("last_time", run.start_time)
                if RUN_REPORTS in run.metadata and run.run_id != own and seen > since:
                    others.append(run)
                    logger.warning(
                        "Run '%s' was under way in this store %.0f s ago. While both are, its runners take rollouts of "
                        "this training, and the other way round; give each training a store of its own.",
                        *(run.run_id, max(0.0, time.time() - seen)),
                    )
        return others


def _this_process() -> dict[str, str | float]:
    """Tells this process from every other, also after its end."""
    return {"host": platform.node(), "pid": os.getpid(), "began": psutil.Process().create_time()}


def _is_at_work(run: Run) -> bool:
    """Whether the trainer of a run is another process of this machine, and has not ended."""
    process = run.metadata[RUN_REPORTS].get("process")
    if not isinstance(process, dict) or process.get("host") != platform.node() or process.get("pid") == os.getpid():
        return False
    with suppress(psutil.Error, TypeError, ValueError, OverflowError):  # anybody may write runs into a store
        return psutil.Process(process["pid"]).create_time() == process.get("began")
    return False


@contextmanager
def _reports(store: LightningStore, name: str, run_id: str) -> Iterator[None]:
    """Report to the run now and then, from a thread that the algorithm cannot block.

    A run whose training was killed cannot be closed by it; after five minutes without a report it is read as lost.
    """

    async def report() -> None:
        await asyncio.sleep(REPORT_SECONDS)
        await repeat(
            lambda: store.start_run(name, run_id=run_id),
            lambda: REPORT_SECONDS,
            *(logger, "Run %s could not report to the store", run_id),
        )

    thread = LoopThread("run-reports")
    reports = thread.start_soon(report())
    try:
        yield
    finally:
        reports.cancel()
        thread.stop()


@dataclass
class RunnerRole:
    """One worker after the other is made from this; it travels to their processes."""

    runner: Runner[Any]
    agent: LitAgent[Any]
    hooks: Sequence[Hook]
    flags: ControlFlags
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
    worker_origin: str = field(default_factory=lambda: worker_id("", generate_id(TOKEN_DIGITS)))
    """Part of the ids of this training's workers in the store, and of no others."""
    start: int = 0
    """Which start of its workers this is, from 0."""

    def at_start(self, start: int) -> "RunnerRole":
        return dataclasses.replace(self, start=start)

    def store_worker_id(self, number: int) -> str:
        name = self.runner.worker_name_of(number) if isinstance(self.runner, LitAgentRunner) else f"Worker-{number}"
        return f"{name}{self.worker_origin}{f'-{self.start}' if self.start else ''}"

    def owns_worker(self, worker_id: str) -> bool:
        return self.worker_origin in worker_id

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        """Work until the event is set; each worker has a runner and a tracer of its own."""
        agent_loop = AGENT_LOOP.get() if isinstance(self.runner, LitAgentRunner) and self.agent.is_async() else None
        work = self._work(store, worker_id, event)
        await (work if agent_loop is None else agent_loop.call(work))

    async def _work(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        runner = copy.copy(self.runner)
        if isinstance(runner, LitAgentRunner):
            runner.set_store_worker_id(self.store_worker_id(worker_id))
            runner.templates = TrustedTemplates(allow_all=self.allow_poml or runner.templates.allow_all)
            runner.templates.add(self.initial_resources)
            runner.failures = self.failures
            if self.thread is not None:
                runner.set_calling_thread(self.thread)
        with runner.run_context(agent=self.agent, store=store, hooks=self.hooks, worker_id=worker_id):
            task = asyncio.current_task()
            assert task is not None  # we are in a coroutine
            follow = asyncio.create_task(self._follow_flags(runner, event, task), name="flags")
            try:
                # A runner that is alone cannot see whether there is an algorithm.
                may_begin = lambda: self.is_alone or self.flags.prepared.is_set() or event.is_set()  # noqa: E731
                await until(may_begin, interval_seconds=PREPARED_SECONDS)
                await runner.iter(event=event)
            finally:
                follow.cancel()

    async def _follow_flags(self, runner: Runner[object], event: ExecutionEvent, task: "asyncio.Task[Any]") -> None:
        """Pause, go on and, if alone or in the calling thread, stop with the training."""
        is_paused = False
        while True:
            if self.is_alone and self.flags.stopped.is_set():
                event.set()
            if self.thread is not None and self.flags.stopped.is_set():
                task.cancel()
                return
            if isinstance(runner, LitAgentRunner) and self.flags.paused.is_set() != is_paused:
                is_paused = not is_paused
                (runner.pause if is_paused else runner.resume)()
            await asyncio.sleep(POLL_SECONDS)
