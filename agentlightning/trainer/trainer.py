"""Trainer: builds the parts, has them placed, and runs the loop."""

import asyncio
import logging
import pkgutil
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from agentlightning.algorithm import Algorithm, Baseline
from agentlightning.errors import ConfigurationError, InvalidTransition, RunnersKilled, TrainingError
from agentlightning.execution import ExecutionEvent, ExecutionStrategy
from agentlightning.execution.events import MultiprocessingEvent
from agentlightning.execution.processes import start_context
from agentlightning.litagent import LitAgent, Route
from agentlightning.litagent.router import Predicate
from agentlightning.store.base import LightningStore
from agentlightning.tracer import OtelTracer, Tracer
from agentlightning.trainer.checks import check_dataset, checked_agent, checked_route, combined, renamed
from agentlightning.trainer.console import Console, ProgressMode, resolved_mode
from agentlightning.trainer.control import TrainingControl
from agentlightning.trainer.dev_run import DevRun, dev_algorithm
from agentlightning.trainer.init_utils import build_component
from agentlightning.trainer.outcomes import failure_of_all
from agentlightning.trainer.parts import built_adapter, built_proxy, built_runner, built_strategy
from agentlightning.trainer.reports import PROMISE, reporting
from agentlightning.trainer.run_config import git_revision, run_config
from agentlightning.trainer.sides import LOOK_SECONDS, AlgorithmSide, RunnerSide, Switches
from agentlightning.trainer.stores import built_store, move_log, served_address, store_address
from agentlightning.trainer.termination import interrupted_by_sigint, stopped_by_sigterm
from agentlightning.types import Dataset, Hook, NamedResources, Run, RunStatus
from agentlightning.types.lifecycle import lifecycle_of
from agentlightning.utils.daemon_threads import CallingThread, DaemonThreads
from agentlightning.utils.deprecation import deprecated

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Value = TypeVar("_Value")


class Trainer(TrainingControl):
    """Runs an algorithm and its runners around one store.

    Every part may be given as an instance, a class, a factory without arguments, a name or import path, or a dictionary
    with its `type` and arguments.

    Args:
        dev: Deprecated; call `dev`.
        n_runners: How many workers run the agent; one, if left out.
        max_rollouts: After how many rollouts each worker ends.
        initial_resources: What the algorithm starts from, by name; published before it and the runners begin.
        tracer: Records what the agent does; an `OtelTracer` that instruments all libraries we know, if left out.
        adapter: Turns spans into the algorithm's data; a `TracerTraceToTriplet`, if left out. A dictionary without
            `type` holds arguments for that.
        store: Where everything is kept: also `memory`, `sqlite:///path`, `postgresql://…`, or a server's URL.
        runner: Runs the agent; a `LitAgentRunner`, if left out.
        strategy: Where things run: `cs` (processes), `shm` (threads), `ray` (actors of a Ray cluster).
        port: Of the store server under `cs` and `ray`.
        algorithm: What learns; needed by `fit`, while `dev` has one of its own.
        llm_proxy: Through which the agent's model calls go.
        n_workers: Deprecated; `n_runners`.
        max_tasks: Deprecated; `max_rollouts`.
        daemon: Accepted for scripts of earlier releases.
        triplet_exporter: Deprecated; `adapter`.
        hooks: Told about every rollout.
        name: What runs are called in the store.
        progress: `auto` shows a live view on a terminal, and elsewhere writes a plain line a step to standard error, as
            `plain` always does; `rich` shows the view, `json` writes events as lines, `off` or None is quiet.
        allow_poml: Let agents format any POML template of the store, which is code of whoever wrote it; those of
            `initial_resources` may be formatted anyway.
    """

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: Any = None,
        llm_proxy: Any = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: Any = None,
        hooks: Hook | Sequence[Hook] | None = None,
        name: str = "fit",
        progress: ProgressMode | None = "auto",
        allow_poml: bool = False,
    ) -> None:
        """Build the parts; nothing runs yet."""
        super().__init__()
        if dev:
            deprecated("Trainer(dev=True) is deprecated; call trainer.dev(...) instead.")
        if not daemon:
            logger.warning("daemon=False has no effect any more: no process of a training outlives it.")
        self.dev_mode = dev
        self.daemon = daemon
        self.port = port
        self.name = name
        self.initial_resources = initial_resources
        self.max_rollouts = renamed("max_rollouts", max_rollouts, "max_tasks", max_tasks)
        asked = renamed("n_runners", n_runners, "n_workers", n_workers)
        self.n_runners = 1 if asked is None else asked
        self.store = built_store(store)
        self.tracer: Tracer = build_component(
            tracer, expected_type=Tracer, spec_name="tracer", default_factory=OtelTracer
        )
        self.adapter = built_adapter(adapter, triplet_exporter)
        self.algorithm: Algorithm | None = build_component(
            algorithm, expected_type=Algorithm, spec_name="algorithm", allow_none=True
        )
        self.strategy = built_strategy(strategy, n_runners=self.n_runners, port=port)
        if self.strategy.n_runners > 0:
            self.n_runners = self.strategy.n_runners
        self.runner = built_runner(runner, tracer=self.tracer, max_rollouts=self.max_rollouts)
        self.llm_proxy = built_proxy(llm_proxy, store=self.store)
        self.hooks: tuple[Hook, ...] = (hooks,) if isinstance(hooks, Hook) else tuple(hooks or ())
        self.progress: ProgressMode = "off" if progress is None else progress
        self.allow_poml = allow_poml
        resolved_mode(self.progress)  # a word that is not known is answered here
        self._agents: list[Route] = []

    triplet_exporter = property(lambda self: self.adapter)

    @property
    def n_workers(self) -> int:
        """The same as `n_runners`."""
        return self.n_runners

    @property
    def max_tasks(self) -> int | None:
        """The same as `max_rollouts`."""
        return self.max_rollouts

    # ------------------------------------------------------------------ agents

    def add_agent(self, agent: LitAgent[Any], name: str | None = None, when: Predicate | None = None) -> None:
        """Register an agent, so that `fit`, `dev` and `run` need not be given one.

        Of several, a task goes to the one that it names in its field `agent` (of an `agl.Task`, in its metadata),
        otherwise to the first whose rule fits, otherwise to the first that has no rule.

        Args:
            name: Of the agent in traces and in the names of its resources; by default that of its function or class.
            when: Whether a task is for this agent; plain or a coroutine function.
        """
        self._agents.append(checked_route(agent, name, when, self._agents))

    def _agent_for(self, agent: LitAgent[Any] | None) -> LitAgent[Any]:
        if agent is not None:
            return checked_agent(agent)
        if not self._agents:
            raise ConfigurationError("There is no agent; pass one, or register it with add_agent.")
        return combined(self._agents)

    # ------------------------------------------------------------------ running

    def fit(
        self,
        agent: LitAgent[Any] | None = None,
        train_dataset: Dataset[Any] | str | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Train an agent; returns when the algorithm is done.

        Args:
            train_dataset: Tasks by number; a plain list will do. A URL is one of a v0.1 server, and deprecated.
        """
        if isinstance(train_dataset, str):
            logger.warning("A URL as data set is of the v0.1 protocol; fit_v0 takes over.")
            self.fit_v0(agent if agent is not None else self._agent_for(None), train_dataset, val_data=val_dataset)
            return
        if self.algorithm is None and (train_dataset is not None or val_dataset is not None):
            raise ConfigurationError(
                "There is no algorithm to read the data sets; give the Trainer one, or call dev to try the agent."
            )
        chosen = self._agent_for(agent)
        failure = self._do(lambda: self._fit(self.algorithm, chosen, train_dataset, val_dataset))
        if failure is not None:
            raise failure

    def dev(
        self,
        agent: LitAgent[Any] | None = None,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Try an agent: send every task once, learn nothing, and print what came back.

        One worker runs in this process, whatever the strategy; the agent runs in the calling thread where that is
        possible, so that `breakpoint()` works in it. What agents run with is what the algorithm would begin with: its
        `dev_resources()`, or the initial resources. A `FastAlgorithm` is run itself.
        """
        algorithm, chosen = dev_algorithm(self.algorithm), self._agent_for(agent)
        # A coroutine runs in the loop of its runner, which is in this thread unless another loop is.
        dev = DevRun(self.progress, None if chosen.is_async() else CallingThread())
        try:
            failure = self._do(lambda: self._fit(algorithm, chosen, train_dataset, val_dataset, dev), dev.thread)
        finally:
            dev.print()
        if failure is not None:
            raise failure

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train the registered agent, without blocking the event loop; without an algorithm, only try it."""
        algorithm = Baseline() if self.algorithm is None else self.algorithm
        agent = self._agent_for(None)
        # Not in a thread of the loop's own pool: that waits for its threads at the end, also in a forked child.
        threads = DaemonThreads("fit")
        work = asyncio.ensure_future(threads.run(lambda: self._fit(algorithm, agent, train_dataset, val_dataset)))
        # The main thread only waits: to interrupt it would leave the run open that the other thread is closing.
        with stopped_by_sigterm(lambda: self._stop_until(work.done), lambda: False):
            try:
                failure = await asyncio.shield(work)
            except asyncio.CancelledError:
                await self._stopped(work)
                raise
            finally:
                threads.close()
        if failure is not None:
            raise failure

    def _do(self, work: Callable[[], _T], thread: CallingThread | None = None) -> _T:
        """Do work that makes event loops and processes: in a thread of its own, unless this one is free for both.

        A thread of a pool is not: a process forked from it waits at its end for that very thread.
        """
        if thread is None and not _is_loop_running() and threading.current_thread() is threading.main_thread():
            return work()
        is_done = threading.Event()

        def do() -> _T:
            try:
                return work()
            finally:
                is_done.set()

        with stopped_by_sigterm(lambda: self._stop_until(is_done.is_set), lambda: True), interrupted_by_sigint():
            return (thread or CallingThread()).wait_for(do, self._stop_if_running)

    def _stop_if_running(self) -> None:
        with suppress(InvalidTransition):  # it has not quite begun, or has just ended
            self.stop()

    def _stop_until(self, is_done: Callable[[], bool]) -> None:
        """Stop a fit that runs in another thread, which may not have begun."""
        while not is_done():
            self._stop_if_running()
            time.sleep(LOOK_SECONDS)

    async def _stopped(self, work: "asyncio.Future[Any]") -> None:
        """Stop a fit that runs in another thread, as soon as it can be stopped, and wait for it."""
        while not work.done():
            self._stop_if_running()
            await asyncio.wait([work], timeout=LOOK_SECONDS)

    def fit_v0(self, *args: Any, **kwargs: Any) -> Any:
        """Train with the v0.1 protocol. Deprecated."""
        return pkgutil.resolve_name("agentlightning.legacy.trainer:fit_v0")(self, *args, **kwargs)

    def _fit(
        self,
        algorithm: Algorithm | None,
        agent: LitAgent[Any],
        train_dataset: Any,
        val_dataset: Any,
        dev: DevRun | None = None,
    ) -> TrainingError | None:
        """Train, or try the agent; returns what is to be raised if every rollout failed."""
        for label, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            check_dataset(label, dataset)
        lifecycle_of(self).step("init")
        self._last_fit = (agent, train_dataset, val_dataset)
        agent.set_trainer(self)
        strategy = self.strategy if dev is None else dev.strategy
        context = start_context(getattr(strategy, "start_method", None))
        switches = Switches(
            paused=MultiprocessingEvent(ctx=context),
            stopped=MultiprocessingEvent(ctx=context),
            prepared=MultiprocessingEvent(ctx=context),
        )
        side = AlgorithmSide(
            algorithm,
            self,
            self.adapter,
            switches,
            train_dataset,
            val_dataset,
            initial_resources=self.initial_resources,
            llm_proxy=self.llm_proxy,
        )
        worker = RunnerSide(
            *(self.runner, agent, self.hooks, switches),
            initial_resources=self.initial_resources,
            allow_poml=self.allow_poml,
            is_alone=getattr(strategy, "role", "both") == "runner",
        )
        if dev is not None:
            worker.failures, worker.thread = dev.failure_log(), dev.thread
        self.tracer.init()
        self._began(switches)
        with stopped_by_sigterm(switches.stopped.set, lambda: not side.is_over):
            try:
                self._execute(strategy, _AlgorithmBundle(self, side, dev), worker)
            except BaseException as error:
                self._ended(error)
                if error is not side.rollout_failure:
                    raise
            else:
                self._ended()
        # Without the frames in which it was made: those of the agent are in its message.
        return None if side.rollout_failure is None else side.rollout_failure.with_traceback(None)

    def _execute(self, strategy: ExecutionStrategy, algorithm: "_AlgorithmBundle", worker: RunnerSide) -> None:
        try:
            strategy.execute(algorithm, worker, self.store)
        except RunnersKilled as error:
            if not algorithm.side.is_done or not self._have_succeeded(error.rollout_ids):
                raise
            logger.warning("%s. Nothing is lost: what they were working on was run again.", error)
        finally:
            self.tracer.teardown()
            move_log(self.store)

    def _have_succeeded(self, rollout_ids: Sequence[str]) -> bool:
        rollouts = asyncio.run(self.store.query_rollouts(rollout_ids=rollout_ids)) if rollout_ids else []
        return all(rollout.status == "succeeded" for rollout in rollouts)

    async def _algorithm_bundle(
        self, store: LightningStore, event: ExecutionEvent, side: AlgorithmSide, dev: DevRun | None = None
    ) -> None:
        """The algorithm's side of a training, kept as a run in the store."""
        run = await self._open_run(store, side, dev)
        run_id = None if run is None else run.run_id
        if side.algorithm is not None:
            side.algorithm.set_run_id(run_id)
        status: RunStatus = "failed"
        summary: dict[str, Any] = {}
        progress = self.progress if dev is None else dev.live_progress
        began = time.monotonic()
        try:
            with reporting(store, self.name, run_id):
                async with Console(
                    progress,
                    store,
                    name=self.name,
                    address=store_address(self.store),
                    run_id=run_id,
                    served_at=served_address(store),
                ) as console:
                    await self._run_side(store, event, side, run, dev)
                    status = "stopped" if side.was_stopped else "succeeded"
                    summary = {**({} if dev is None else dev.summary()), **await console.summary()}
                    if side.rollout_failure is not None:
                        raise side.rollout_failure
        except BaseException as error:
            status = "stopped" if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
            summary = {**summary, "error": f"{type(error).__name__}: {error}"}
            if isinstance(error, Exception) and error is not side.rollout_failure:
                logger.error("The algorithm failed: %s: %s", type(error).__name__, error)  # it is raised
            raise
        finally:
            if run_id is not None:
                summary = {**side.measured(), **summary, "seconds": round(time.monotonic() - began, 3)}
                await asyncio.shield(store.finish_run(run_id, status, summary=summary))

    async def _run_side(
        self, store: LightningStore, event: ExecutionEvent, side: AlgorithmSide, run: Run | None, dev: DevRun | None
    ) -> None:
        """Run the algorithm, and look whether every rollout failed; that is the cause of an error without another."""
        try:
            await side.run(store, event)
        except Exception as error:
            failure = None if run is None else await _read_failure(store, run.start_time)
            if failure is not None and error.__cause__ is None and error.__context__ is None:
                raise error from failure
            raise
        finally:
            if dev is not None and run is not None:
                await dev.read(store, run.start_time)
        if side.is_done and side.algorithm is not None and run is not None:
            side.rollout_failure = await failure_of_all(store, run.start_time)

    async def _open_run(self, store: LightningStore, side: AlgorithmSide, dev: DevRun | None) -> Run | None:
        strategy = self.strategy if dev is None else dev.strategy
        parts = {
            "algorithm": side.algorithm,
            "adapter": self.adapter,
            "tracer": self.tracer,
            "runner": self.runner,
            "strategy": strategy,
            "llm_proxy": self.llm_proxy,
        }
        counts = {
            "n_runners": self.n_runners if dev is None else dev.strategy.n_runners,
            "max_rollouts": self.max_rollouts,
            "n_train": None if side.train_dataset is None else len(side.train_dataset),
            "n_val": None if side.val_dataset is None else len(side.val_dataset),
        }
        config = run_config(parts, counts, await asyncio.to_thread(git_revision))
        try:
            return await store.start_run(self.name, config=config, metadata=PROMISE)
        except NotImplementedError:  # a store of the 0.2 release keeps no runs
            return None


class _AlgorithmBundle:
    """The algorithm's side as strategies call it."""

    def __init__(self, trainer: Trainer, side: AlgorithmSide, dev: DevRun | None) -> None:
        self._trainer = trainer
        self._dev = dev
        self.side = side
        self.on_prepared: Callable[[], Awaitable[None]] | None = None

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None:
        self.side.on_prepared = self.on_prepared
        await self._trainer._algorithm_bundle(store, event, self.side, self._dev)

    def give_up(self, error: TrainingError) -> None:
        """End the algorithm with an error."""
        self.side.give_up(error)


async def _read_failure(store: LightningStore, moment: float) -> TrainingError | None:
    """As `failure_of_all`, beside an error that matters more than a store that cannot be read."""
    try:
        return await failure_of_all(store, moment)
    except Exception as error:  # noqa: BLE001 # as above
        logger.warning("Whether rollouts have failed could not be read: %s", error)
        return None


def _is_loop_running() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
