"""Trainer: builds the parts, has them placed, and runs the loop."""

import asyncio
import logging
import pkgutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from agentlightning.algorithm import Algorithm, Baseline, FastAlgorithm
from agentlightning.errors import ConfigurationError, InvalidTransition, RunnersKilled, TrainingError
from agentlightning.execution import ExecutionEvent
from agentlightning.execution.events import MultiprocessingEvent
from agentlightning.execution.processes import start_context
from agentlightning.litagent import LitAgent, Route
from agentlightning.litagent.router import Predicate
from agentlightning.store.base import LightningStore
from agentlightning.tracer import OtelTracer, Tracer
from agentlightning.trainer.checks import check_dataset, checked_agent, checked_route, combined, renamed
from agentlightning.trainer.console import Console, ProgressMode, resolved_mode
from agentlightning.trainer.control import TrainingControl
from agentlightning.trainer.init_utils import build_component
from agentlightning.trainer.parts import built_adapter, built_proxy, built_runner, built_strategy
from agentlightning.trainer.reports import PROMISE, reporting
from agentlightning.trainer.run_config import git_revision, run_config
from agentlightning.trainer.sides import LOOK_SECONDS, AlgorithmSide, RunnerSide, Switches
from agentlightning.trainer.stores import built_store, move_log, served_address, store_address
from agentlightning.trainer.termination import stopped_by_sigterm
from agentlightning.types import Dataset, Hook, NamedResources, RunStatus
from agentlightning.types.lifecycle import lifecycle_of
from agentlightning.utils.daemon_threads import DaemonThreads
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
        store: Where everything is kept: also `memory`, `sqlite:///path`, or a server's URL.
        runner: Runs the agent; a `LitAgentRunner`, if left out.
        strategy: Where things run: `cs` (processes), `shm` (threads).
        port: Of the store server under `cs`.
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
        self.progress = progress
        self.allow_poml = allow_poml
        resolved_mode(progress)  # a word that is not known is answered here
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
        self._fit(self.algorithm, self._agent_for(agent), train_dataset, val_dataset)

    def dev(
        self,
        agent: LitAgent[Any] | None = None,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Try an agent: as `fit`, with an algorithm that trains nothing."""
        algorithm = Baseline() if self.algorithm is None else self.algorithm
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                f"dev needs a FastAlgorithm such as Baseline, not a {type(algorithm).__name__}; call fit to train."
            )
        self._fit(algorithm, self._agent_for(agent), train_dataset, val_dataset)

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
                await asyncio.shield(work)
            except asyncio.CancelledError:
                await self._stopped(work)
                raise
            finally:
                threads.close()

    def _stop_if_running(self) -> None:
        with suppress(InvalidTransition):  # it has not quite begun, or has just ended
            self.stop()

    def _stop_until(self, is_done: Callable[[], bool]) -> None:
        """Stop a fit that runs in another thread, which may not have begun."""
        while not is_done():
            self._stop_if_running()
            time.sleep(LOOK_SECONDS)

    async def _stopped(self, work: "asyncio.Future[None]") -> None:
        """Stop a fit that runs in another thread, as soon as it can be stopped, and wait for it."""
        while not work.done():
            self._stop_if_running()
            await asyncio.wait([work], timeout=LOOK_SECONDS)

    def fit_v0(self, *args: Any, **kwargs: Any) -> Any:
        """Train with the v0.1 protocol. Deprecated."""
        return pkgutil.resolve_name("agentlightning.legacy.trainer:fit_v0")(self, *args, **kwargs)

    def _fit(self, algorithm: Algorithm | None, agent: LitAgent[Any], train_dataset: Any, val_dataset: Any) -> None:
        for label, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            check_dataset(label, dataset)
        lifecycle_of(self).step("init")
        self._last_fit = (agent, train_dataset, val_dataset)
        agent.set_trainer(self)
        context = start_context(getattr(self.strategy, "start_method", None))
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
        is_alone = getattr(self.strategy, "role", "both") == "runner"
        worker = RunnerSide(
            *(self.runner, agent, self.hooks, switches),
            initial_resources=self.initial_resources,
            allow_poml=self.allow_poml,
            is_alone=is_alone,
        )
        self.tracer.init()
        self._began(switches)
        with stopped_by_sigterm(switches.stopped.set, lambda: not side.is_over):
            try:
                self._execute(_AlgorithmBundle(self, side), worker)
            except BaseException as error:
                self._ended(error)
                raise
            self._ended()

    def _execute(self, algorithm: "_AlgorithmBundle", worker: RunnerSide) -> None:
        try:
            self.strategy.execute(algorithm, worker, self.store)
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

    async def _algorithm_bundle(self, store: LightningStore, event: ExecutionEvent, side: AlgorithmSide) -> None:
        """The algorithm's side of a training, kept as a run in the store."""
        run_id = await self._open_run(store, side)
        if side.algorithm is not None:
            side.algorithm.set_run_id(run_id)
        status: RunStatus = "failed"
        summary: dict[str, Any] = {}
        began = time.monotonic()
        try:
            with reporting(store, self.name, run_id):
                async with Console(
                    self.progress,
                    store,
                    name=self.name,
                    address=store_address(self.store),
                    run_id=run_id,
                    served_at=served_address(store),
                ) as console:
                    await side.run(store, event)
                    status = "stopped" if side.was_stopped else "succeeded"
                    summary = await console.summary()
        except BaseException as error:
            status = "stopped" if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else "failed"
            summary = {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, Exception):
                logger.exception("The algorithm failed.")
            raise
        finally:
            if run_id is not None:
                summary = {**side.measured(), **summary, "seconds": round(time.monotonic() - began, 3)}
                await asyncio.shield(store.finish_run(run_id, status, summary=summary))

    async def _open_run(self, store: LightningStore, side: AlgorithmSide) -> str | None:
        parts = {
            "algorithm": side.algorithm,
            "adapter": self.adapter,
            "tracer": self.tracer,
            "runner": self.runner,
            "strategy": self.strategy,
            "llm_proxy": self.llm_proxy,
        }
        counts = {
            "n_runners": self.n_runners,
            "max_rollouts": self.max_rollouts,
            "n_train": None if side.train_dataset is None else len(side.train_dataset),
            "n_val": None if side.val_dataset is None else len(side.val_dataset),
        }
        config = run_config(parts, counts, await asyncio.to_thread(git_revision))
        try:
            return (await store.start_run(self.name, config=config, metadata=PROMISE)).run_id
        except NotImplementedError:  # a store of the 0.2 release keeps no runs
            return None


class _AlgorithmBundle:
    """The algorithm's side as strategies call it."""

    def __init__(self, trainer: Trainer, side: AlgorithmSide) -> None:
        self._trainer = trainer
        self.side = side
        self.on_prepared: Callable[[], Awaitable[None]] | None = None

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None:
        self.side.on_prepared = self.on_prepared
        await self._trainer._algorithm_bundle(store, event, self.side)

    def give_up(self, error: TrainingError) -> None:
        """End the algorithm with an error."""
        self.side.give_up(error)
