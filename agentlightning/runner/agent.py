"""LitAgentRunner: runs an agent on rollouts from the queue, one after the other or many at once."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.litagent import LitAgent
from agentlightning.runner.attempt import AttemptRun, Surroundings, innermost
from agentlightning.runner.base import Runner
from agentlightning.runner.heartbeat import Heartbeat, LaunchMode
from agentlightning.store.base import LightningStore
from agentlightning.tracer import Tracer
from agentlightning.types import AttemptedRollout, Hook, NamedResources, Rollout, RolloutMode
from agentlightning.types.lifecycle import Lifecycle, LifecycleState
from agentlightning.utils.daemon_threads import DaemonThreads
from agentlightning.utils.loop_thread import LoopThread

if TYPE_CHECKING:
    from agentlightning.execution.events import ExecutionEvent

__all__ = ["LitAgentRunner"]

logger = logging.getLogger(__name__)

T_task = TypeVar("T_task")

EVENT_SECONDS: Final = 0.1
"""How often a stop event is looked at while there is nothing else to do."""


@dataclass(frozen=True)
class _Abilities:
    """What a store can do; those written for the 0.2 release can do less."""

    waits: bool = False
    """For work, instead of being asked again and again."""
    names_claimers: bool = False
    names_starters: bool = False
    has_batches: bool = False

    @classmethod
    def of(cls, store: LightningStore) -> "_Abilities":
        store = innermost(store)
        has_batches = type(store).dequeue_many_rollouts is not LightningStore.dequeue_many_rollouts
        return cls(
            waits=_takes(store.dequeue_rollout, "wait"),
            names_claimers=_takes(store.dequeue_rollout, "worker_id"),
            names_starters=_takes(store.start_rollout, "worker_id"),
            has_batches=has_batches and _takes(store.dequeue_many_rollouts, "wait"),
        )


class LitAgentRunner(Runner[T_task]):
    """Claims rollouts and runs an agent on them."""

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: LaunchMode = "thread",
        heartbeat_include_gpu: bool = False,
        *,
        max_concurrency: int = 1,
        agent: LitAgent[T_task] | None = None,
        worker_name: str = "Worker",
    ) -> None:
        """Nothing is claimed yet.

        Args:
            tracer: Records what the agent does.
            max_rollouts: End after so many; None goes on until stopped.
            poll_interval: Seconds for which the store is asked to wait for work, or until it is asked again.
            heartbeat_interval: Seconds between signs of life of the worker; zero or less gives none.
            interval_jitter: Seconds by which these vary.
            heartbeat_launch_mode: `thread`, or `asyncio` for a store that may only be used in its own loop.
            heartbeat_include_gpu: Tell of the GPUs too.
            max_concurrency: How many rollouts run at once: coroutines together, plain functions in threads.
            agent: Instead of the argument of `init`.
            worker_name: What workers are called in the store, with their number behind it.
        """
        super().__init__()
        if max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency must be at least 1; it is {max_concurrency}.")
        self._tracer = tracer
        self._max_rollouts = max_rollouts
        self._poll_interval = poll_interval
        self._heartbeat = Heartbeat(
            heartbeat_interval, interval_jitter, heartbeat_launch_mode, includes_gpu=heartbeat_include_gpu
        )
        self._max_concurrency = max_concurrency
        self._worker_name = worker_name
        self._agent: LitAgent[T_task] | None = agent
        self._store: LightningStore | None = None
        self._abilities = _Abilities()
        self._hooks: list[Hook] = []
        self._around: Surroundings | None = None
        self._is_new = True
        self._threads = DaemonThreads("agent")
        self._life = Lifecycle("The runner")

    # ------------------------------------------------------------------ life cycle

    def init(
        self, agent: LitAgent[T_task] | None = None, *, hooks: Sequence[Hook] | None = None, **kwargs: Any
    ) -> None:
        """Take the agent and the hooks."""
        self._agent = agent if agent is not None else self._agent
        self.get_agent().set_runner(self)
        self._hooks = list(hooks or [])
        self._tracer.init()
        self._life.step("become ready")

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Take the store, in the worker that will use it."""
        self._store = store
        self._is_new = True
        self._around = None
        self._abilities = _Abilities.of(store)
        self.worker_id = worker_id
        self._tracer.init_worker(worker_id, store)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._agent = None
        self._store = None
        self._around = None
        self.worker_id = None
        self._hooks = []
        self._threads.close()
        self._tracer.teardown()
        self._life.step("end")

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        self.worker_id = None
        self._tracer.teardown_worker(worker_id)

    @property
    def state(self) -> LifecycleState:
        return self._life.state

    def pause(self) -> None:
        """Claim nothing more until `resume`; what runs goes on."""
        self._life.step("pause")

    def resume(self) -> None:
        """Undo `pause`."""
        self._life.step("resume")

    def stop(self) -> None:
        """Claim nothing more, and end when what runs has ended."""
        self._life.step("stop")

    def __getstate__(self) -> dict[str, Any]:
        """A copy, here or in another process, is as new: with a tracer of its own, and nothing that runs."""
        kept = {name: value for name, value in vars(self).items() if name not in ("_threads", "_life")}
        return {**kept, "_tracer": copy.copy(self._tracer), "_store": None, "_around": None, "worker_id": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._threads = DaemonThreads("agent")
        self._life = Lifecycle("The runner")

    # ------------------------------------------------------------------ parts

    @property
    def tracer(self) -> Tracer:
        return self._tracer

    def get_agent(self) -> LitAgent[T_task]:
        """The agent; ValueError if there is none."""
        if self._agent is None:
            raise ConfigurationError("The runner has no agent; call init(agent) first, or use run_context.")
        return self._agent

    def get_store(self) -> LightningStore:
        """The store; ValueError if there is none."""
        if self._store is None:
            raise ConfigurationError("The runner has no store; call init_worker(worker_id, store) first.")
        return self._store

    def get_worker_id(self) -> str:
        """What the store calls this worker."""
        return self.worker_id_for(self.worker_id)

    def worker_id_for(self, number: int | None) -> str:
        """What the store calls the worker of this number."""
        return f"{self._worker_name}-{'Unknown' if number is None else number}"

    # ------------------------------------------------------------------ working off the queue

    async def iter(self, *, event: "ExecutionEvent | None" = None) -> None:
        """Run rollouts of the queue until the event is set, `stop` is called, or `max_rollouts` have been run."""
        self._life.step("start")
        try:
            with self._heartbeat.beating(self.get_store(), self.get_worker_id()):
                await self._work_off(event)
        except BaseException as error:
            self._life.step("fail", error=error)
            raise
        self._life.step("finish" if self._life.state is not LifecycleState.STOPPING else "end")

    async def _work_off(self, event: "ExecutionEvent | None") -> None:
        running: set[asyncio.Task[None]] = set()
        claimed = 0
        try:
            while not self._is_over(event):
                left = self._max_concurrency - len(running)
                if self._max_rollouts is not None:
                    left = min(left, self._max_rollouts - claimed)
                    if claimed >= self._max_rollouts and not running:
                        break
                if left <= 0 or self._life.state is LifecycleState.PAUSED:
                    running = await self._some_left(running)
                    continue
                rollouts = await self._claim(left, event, is_idle=not running)
                claimed += len(rollouts)
                running = await self._take_up(rollouts, running)
            if running:
                await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def _is_over(self, event: "ExecutionEvent | None") -> bool:
        return self._life.state is LifecycleState.STOPPING or (event is not None and event.is_set())

    async def _take_up(
        self, rollouts: Sequence[AttemptedRollout], running: "set[asyncio.Task[None]]"
    ) -> "set[asyncio.Task[None]]":
        if self._max_concurrency == 1:
            for rollout in rollouts:
                await self._step_impl(rollout)
            return running
        tasks = {asyncio.create_task(self._run_claimed(r), name=f"rollout-{r.rollout_id}") for r in rollouts}
        return await self._some_left(running | tasks, patience=0.0 if rollouts else EVENT_SECONDS)

    async def _some_left(
        self, running: "set[asyncio.Task[None]]", *, patience: float = EVENT_SECONDS
    ) -> "set[asyncio.Task[None]]":
        """Those that still run, after one has ended or a moment has passed."""
        if not running:
            await asyncio.sleep(patience)
            return running
        done, pending = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return pending

    async def _run_claimed(self, rollout: AttemptedRollout) -> None:
        await self._step_impl(rollout)

    # ------------------------------------------------------------------ claiming

    async def _claim(self, limit: int, event: "ExecutionEvent | None", *, is_idle: bool) -> Sequence[AttemptedRollout]:
        """Rollouts from the head of the queue; where there are none, wait for a while."""
        try:
            # The first claim may wait at once: that opens the store's live channel, which the next ones then use.
            rollouts = [] if self._is_new and self._abilities.waits else await self._dequeue(limit)
            self._is_new = False
            if rollouts or not is_idle:
                return rollouts
            if self._abilities.waits:
                asked = asyncio.get_running_loop().time()
                rollouts = await self._wait_for_work(limit, event)
                # A store that did not wait, though it was asked to, is one of the 0.2 release behind another.
                if rollouts or asyncio.get_running_loop().time() - asked > self._poll_interval / 2:
                    return rollouts
        except StoreUnavailable as error:
            logger.warning("The store cannot be reached (%s); asking again.", error)
        await self._sleep_until_next_poll(event)
        return []

    async def _dequeue(self, limit: int, **options: Any) -> Sequence[AttemptedRollout]:
        store = self.get_store()
        if limit > 1 and self._abilities.has_batches:
            return await store.dequeue_many_rollouts(limit=limit, worker_id=self.get_worker_id(), **options)
        if self._abilities.names_claimers:
            claimed = await store.dequeue_rollout(worker_id=self.get_worker_id(), **options)
        else:
            claimed = await store.dequeue_rollout()
        if claimed is None:
            return []
        return [claimed] if claimed.attempt.worker_id is not None else await self._named_on(claimed)

    async def _named_on(self, rollout: AttemptedRollout) -> Sequence[AttemptedRollout]:
        """Put our name on a claim, in a store of the 0.2 release, which does not do so itself."""
        try:
            await self.get_store().update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, worker_id=self.get_worker_id()
            )
        except Exception:  # somebody else will have to run it
            logger.exception("Rollout %s could not be claimed and is skipped.", rollout.rollout_id)
            return []
        return [rollout]

    async def _wait_for_work(self, limit: int, event: "ExecutionEvent | None") -> Sequence[AttemptedRollout]:
        """As `_dequeue`, but the store answers when there is work, and we give up when we are stopped."""
        waiting = asyncio.ensure_future(self._dequeue(limit, wait=self._poll_interval))
        try:
            while not waiting.done() and not self._is_over(event) and self._life.state is not LifecycleState.PAUSED:
                await asyncio.wait([waiting], timeout=EVENT_SECONDS)
        finally:
            if not waiting.done():
                waiting.cancel()  # a claim that is on its way is given back
                await asyncio.wait([waiting])
        return [] if waiting.cancelled() else waiting.result()

    async def _sleep_until_next_poll(self, event: "ExecutionEvent | None" = None) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._poll_interval
        while loop.time() < until and not self._is_over(event):  # noqa: ASYNC110 # the event may be another process's
            await asyncio.sleep(min(EVENT_SECONDS, self._poll_interval))

    # ------------------------------------------------------------------ one rollout

    async def step(
        self,
        input: T_task,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: "ExecutionEvent | None" = None,
    ) -> Rollout:
        """Run the agent on one task, past the queue; what it raises is raised, after the attempt was marked.

        Args:
            resources: Published first, so that they are the latest; None takes the latest there are.
        """
        store = self.get_store()
        resources_id = None if resources is None else (await store.add_resources(resources)).resources_id
        options: dict[str, Any] = {}
        if self._abilities.names_starters:
            options["worker_id"] = self.get_worker_id()
        started = await store.start_rollout(input=input, mode=mode, resources_id=resources_id, **options)
        await self._step_impl(started, raise_on_exception=True)
        rollout = await store.get_rollout_by_id(started.rollout_id)
        if rollout is None:
            raise RuntimeError(f"Failed to fetch completed rollout by id after step: {started.rollout_id}")
        return rollout

    def step_sync(
        self, input: T_task, *, resources: NamedResources | None = None, mode: RolloutMode | None = None
    ) -> Rollout:
        """As `step`, for code without an event loop."""
        thread = LoopThread("agl-runner-step")
        try:
            return thread.run(self.step(input, resources=resources, mode=mode))
        finally:
            thread.stop()

    def _surroundings(self) -> Surroundings:
        if self._around is None:
            self._around = Surroundings(
                agent=self.get_agent(),
                store=self.get_store(),
                tracer=self._tracer,
                runner=self,
                threads=self._threads,
                hooks=self._hooks,
            )
        return self._around

    async def _step_impl(self, next_rollout: AttemptedRollout, raise_on_exception: bool = False) -> str:
        attempt = AttemptRun(self._surroundings(), next_rollout)
        await attempt.run()
        if raise_on_exception and attempt.error is not None:
            raise attempt.error
        return next_rollout.rollout_id


def _takes(method: Any, parameter: str) -> bool:
    """Whether a method knows a parameter."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
    return parameter in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
