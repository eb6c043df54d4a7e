"""Trainer: builds the parts, has them placed, and runs the loop."""

import asyncio
import functools
import logging
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.algorithm import Algorithm, Baseline
from agentlightning.errors import ConfigurationError, InvalidTransition, RunnersKilled, TrainingError
from agentlightning.execution.events import ControlFlags, MultiprocessingEvent
from agentlightning.execution.processes import start_context
from agentlightning.litagent import CommandAgent, LitAgent, Route
from agentlightning.litagent.invocation import Predicate
from agentlightning.tracer import OtelTracer, Tracer
from agentlightning.trainer.components import (
    USER_OF_TRAINER,
    build_adapter,
    build_algorithm,
    build_proxy,
    build_runner,
    build_store,
    build_strategy,
    check_reads_adapter,
    checked_agent,
    checked_route,
    combined,
    move_log,
    renamed,
    store_address,
)
from agentlightning.trainer.control import TrainingControl, stopped_by_signals
from agentlightning.trainer.datasets import as_dataset
from agentlightning.trainer.init_utils import build_component
from agentlightning.trainer.outcomes import DevRun, dev_algorithm
from agentlightning.trainer.roles import AlgorithmRole, RunnerRole
from agentlightning.trainer.views import ProgressMode, resolved_mode
from agentlightning.types import Dataset, Hook, NamedResources
from agentlightning.types.lifecycle import lifecycle_of
from agentlightning.utils.daemon_threads import CallingThread, DaemonThreads
from agentlightning.utils.deadline import POLL_SECONDS
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.spelling import suggests_arguments

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@suggests_arguments
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
            `type` holds arguments for that. Refused with an algorithm that reads model calls by itself.
        store: Where everything is kept: also `memory`, `sqlite:///path`, `postgresql://…`, or a server's URL.
        runner: Runs the agent; a `LitAgentRunner`, if left out.
        strategy: Where things run: `cs` (processes), `shm` (threads), `ray` (actors of a Ray cluster).
        port: Of the store server under `cs` and `ray`.
        algorithm: What learns; needed by `fit`, while `dev` has one of its own.
        llm_proxy: Through which the agent's model calls go.
        n_workers: Deprecated; `n_runners`.
        max_tasks: Deprecated; `max_rollouts`.
        daemon: Accepted and ignored.
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
            deprecated("Trainer(dev=True) is deprecated; call trainer.dev(...) instead.", stacklevel=USER_OF_TRAINER)
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
        self.store = build_store(store)
        self.tracer: Tracer = build_component(
            tracer, expected_type=Tracer, spec_name="tracer", default_factory=OtelTracer
        )
        self.adapter = build_adapter(adapter, triplet_exporter)
        self.algorithm: Algorithm | None = build_algorithm(algorithm)
        if (adapter, triplet_exporter) != (None, None) and self.algorithm is not None:
            check_reads_adapter(self.algorithm)
        self.strategy = build_strategy(strategy, n_runners=self.n_runners, port=port)
        if self.strategy.n_runners > 0:
            self.n_runners = self.strategy.n_runners
        self.runner = build_runner(runner, tracer=self.tracer, max_rollouts=self.max_rollouts)
        self.llm_proxy = build_proxy(llm_proxy, store=self.store)
        self.hooks: tuple[Hook, ...] = (hooks,) if isinstance(hooks, Hook) else tuple(hooks or ())
        self.progress: ProgressMode = "off" if progress is None else progress
        self.allow_poml = allow_poml
        resolved_mode(self.progress)  # raises if it is no mode
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
        train_dataset: Dataset[Any] | str | Path | None = None,
        val_dataset: Dataset[Any] | str | Path | None = None,
    ) -> None:
        """Train an agent; returns when the algorithm is done.

        Args:
            train_dataset: Tasks by number; a plain list will do, and so will a data frame, or the path of a .jsonl,
                .json, .csv or .parquet file. A text that begins with http is the URL of a legacy server, and
                deprecated.
            val_dataset: Likewise.
        """
        if isinstance(train_dataset, str) and (self.algorithm is None or train_dataset.startswith("http")):
            logger.warning("A URL as data set is of the legacy protocol; fit_v0 takes over.")
            self.fit_v0(agent if agent is not None else self._agent_for(None), train_dataset, val_data=val_dataset)
            return
        if self.algorithm is None and (train_dataset is not None or val_dataset is not None):
            raise ConfigurationError(
                "There is no algorithm to read the data sets; give the Trainer one, or call dev to try the agent."
            )
        chosen = self._agent_for(agent)
        work = functools.partial(self._fit, self.algorithm, chosen, train_dataset, val_dataset)
        failure = work() if _is_free_thread() else self._wait_for(work, CallingThread())
        if failure is not None:
            raise failure

    def dev(
        self,
        agent: LitAgent[Any] | None = None,
        train_dataset: Dataset[Any] | str | Path | None = None,
        val_dataset: Dataset[Any] | str | Path | None = None,
    ) -> None:
        """Try an agent: send every task once, learn nothing, and print what came back.

        One worker runs in this process, whatever the strategy; the agent runs in the calling thread where that is
        possible, so that `breakpoint()` works in it. What agents run with is what the algorithm would begin with: its
        `dev_resources()`, or the initial resources. A `FastAlgorithm` is run itself.
        """
        algorithm, chosen = dev_algorithm(self.algorithm), self._agent_for(agent)
        # A coroutine runs in the loop of its runner, which is in this thread unless another loop is.
        dev = DevRun(self.progress, None if chosen.is_async() else CallingThread(), address=store_address(self.store))
        dev.program = chosen.command[0] if isinstance(chosen, CommandAgent) else None
        work = functools.partial(self._fit, algorithm, chosen, train_dataset, val_dataset, dev)
        try:
            is_here = dev.thread is None and _is_free_thread()
            failure = work() if is_here else self._wait_for(work, dev.thread or CallingThread())
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
        with stopped_by_signals(lambda: self._stop_until(work.done)):
            try:
                failure = await asyncio.shield(work)
            except asyncio.CancelledError:
                await threads.run(lambda: self._stop_until(work.done))
                raise
            finally:
                threads.close()
        if failure is not None:
            raise failure

    def _wait_for(self, work: Callable[[], _T], thread: CallingThread) -> _T:
        """Do work that makes event loops and processes in a thread of its own, and wait for it in the calling one."""
        is_done = threading.Event()

        def do() -> _T:
            try:
                return work()
            finally:
                is_done.set()

        def is_urgent(received: Sequence[int]) -> bool:  # the agent may run in this thread
            return len(received) == 1 or received[-1] == signal.SIGINT

        with stopped_by_signals(lambda: self._stop_until(is_done.is_set), is_urgent):
            return thread.wait_for(do, self._stop_if_running)

    def _stop_if_running(self) -> None:
        with suppress(InvalidTransition):  # it has not quite begun, or has just ended
            self.stop()

    def _stop_until(self, is_done: Callable[[], bool]) -> None:
        """Stop a fit that runs in another thread, which may not have begun."""
        while not is_done():
            self._stop_if_running()
            time.sleep(POLL_SECONDS)

    def fit_v0(self, *args: Any, **kwargs: Any) -> Any:
        """Train with the legacy protocol. Deprecated."""
        return pkgutil.resolve_name("agentlightning.legacy.trainer:fit_v0")(self, *args, **kwargs)

    def _fit(
        self,
        algorithm: Algorithm | None,
        agent: LitAgent[Any],
        train_dataset: object,
        val_dataset: object,
        dev: DevRun | None = None,
    ) -> TrainingError | None:
        """Train, or try the agent; returns what is to be raised if every rollout failed."""
        self._last_fit = (agent, train_dataset, val_dataset)
        train_dataset, val_dataset = as_dataset("train_dataset", train_dataset), as_dataset("val_dataset", val_dataset)
        lifecycle_of(self).step("init")
        agent.set_trainer(self)
        strategy = self.strategy if dev is None else dev.strategy
        context = start_context(getattr(strategy, "start_method", None))
        flags = ControlFlags(
            paused=MultiprocessingEvent(ctx=context),
            stopped=MultiprocessingEvent(ctx=context),
            prepared=MultiprocessingEvent(ctx=context),
        )
        role = AlgorithmRole(algorithm, self, flags, train_dataset, val_dataset, dev)
        worker = RunnerRole(
            *(self.runner, agent, self.hooks, flags),
            initial_resources=self.initial_resources,
            allow_poml=self.allow_poml,
            is_alone=getattr(strategy, "role", "both") == "runner",
        )
        if dev is not None:
            worker.failures, worker.thread = dev.failure_log(), dev.thread
        self.tracer.init()
        self._began(flags)

        def is_urgent(received: Sequence[int]) -> bool:  # to end runners takes a limited time, which is not cut short
            return received[-1] == signal.SIGINT in received[:-1] and not role.is_over

        with stopped_by_signals(flags.stopped.set, is_urgent), self._ending(role):
            strategy.execute(role, worker, self.store)
            if strategy.is_interrupted:  # by a KeyboardInterrupt that no handler of ours has raised
                raise KeyboardInterrupt
        # Without the frames in which it was made: those of the agent are in its message.
        return None if role.rollout_failure is None else role.rollout_failure.with_traceback(None)

    @contextmanager
    def _ending(self, role: AlgorithmRole) -> Iterator[None]:
        """Close the training however it ends; that every rollout failed is not raised here."""
        try:
            try:
                yield
            except RunnersKilled as error:
                ids = error.rollout_ids
                rollouts = asyncio.run(self.store.query_rollouts(rollout_ids=ids)) if ids else []
                if not (role.is_done and all(rollout.status == "succeeded" for rollout in rollouts)):
                    raise
                logger.warning("%s. Nothing is lost: what they were working on was run again.", error)
            finally:
                self.tracer.teardown()
                move_log(self.store)
        except BaseException as error:
            self._ended(error)
            if error is not role.rollout_failure:
                raise
        else:
            self._ended()


def _is_free_thread() -> bool:
    """Whether this thread may make event loops and processes.

    One in which a loop runs may not, nor one of a pool: a process forked from it waits at its end for that very thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread() is threading.main_thread()
    return False
