"""LitAgentRunner: runs an agent on rollouts from the queue, one after the other or many at once."""

import asyncio
import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.litagent import LitAgent
from agentlightning.runner.attempt import AttemptRun, RunnerContext
from agentlightning.runner.base import Runner
from agentlightning.runner.failures import FailureLog
from agentlightning.runner.heartbeat import Heartbeat, LaunchMode
from agentlightning.runner.pool import Slot, WorkerPool
from agentlightning.store.base import LightningStore
from agentlightning.store.claims import Claim
from agentlightning.store.foreign import adapted
from agentlightning.store.forwarding import innermost
from agentlightning.tracer import Tracer
from agentlightning.types import AttemptedRollout, Hook, NamedResources, Rollout, RolloutMode
from agentlightning.types.lifecycle import LifecycleState, lifecycle_of
from agentlightning.types.resources import TrustedTemplates
from agentlightning.utils.daemon_threads import CallingThread, DaemonThreads
from agentlightning.utils.deadline import POLL_SECONDS, until
from agentlightning.utils.id import generate_id
from agentlightning.utils.id import worker_id as unique_worker_id
from agentlightning.utils.log_failures import log_failures

if TYPE_CHECKING:
    from agentlightning.execution.events import ExecutionEvent

__all__ = ["LitAgentRunner"]

logger = logging.getLogger(__name__)

T_task = TypeVar("T_task")

TOKEN_DIGITS: Final = 8
SHORTEST_POLL_SECONDS: Final = 0.01
"""Polling more often keeps a processor busy."""


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
        allow_poml: bool = False,
    ) -> None:
        """Take the options; `iter` claims rollouts.

        Args:
            tracer: Records what the agent does.
            max_rollouts: End after so many; None goes on until stopped.
            poll_interval: Seconds that the store waits for work in one request, or between two requests.
            heartbeat_interval: Seconds between signs of life of the worker; zero or less gives none.
            interval_jitter: Seconds by which these vary.
            heartbeat_launch_mode: `thread`, or `asyncio` for a store that may only be used in its own loop.
            heartbeat_include_gpu: Report the GPUs too.
            max_concurrency: How many rollouts run at once: coroutines together, plain functions in threads.
            agent: Instead of the argument of `init`.
            worker_name: How the ids of workers begin, with their number behind it.
            allow_poml: Let agents format any POML template of the store, which is code of whoever wrote it.
        """
        super().__init__()
        if max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency must be at least 1; it is {max_concurrency}.")
        self._tracer = tracer
        self._max_rollouts = max_rollouts
        self._poll_interval = max(poll_interval, SHORTEST_POLL_SECONDS)
        self._heartbeat = Heartbeat(
            heartbeat_interval, interval_jitter, heartbeat_launch_mode, includes_gpu=heartbeat_include_gpu
        )
        self._max_concurrency = max_concurrency
        self._worker_name = worker_name
        self.templates = TrustedTemplates(allow_all=allow_poml)
        """Which POML templates agents may format."""
        self.failures = FailureLog()
        """Logs rollouts that failed."""
        self._worker_token: str | None = None
        self._store_worker_id: str | None = None
        self._agent: LitAgent[T_task] | None = agent
        self._store: LightningStore | None = None
        self._hooks: list[Hook] = []
        self._context: RunnerContext | None = None
        self._has_logged_outage = False
        self._threads: DaemonThreads = DaemonThreads("agent")

    # ------------------------------------------------------------------ life cycle

    def init(
        self, agent: LitAgent[T_task] | None = None, *, hooks: Sequence[Hook] | None = None, **kwargs: object
    ) -> None:
        """Take the agent and the hooks."""
        self._agent = agent if agent is not None else self._agent
        self.get_agent().set_runner(self)
        self._hooks = list(hooks or [])
        self._tracer.init()
        lifecycle_of(self).step("init")

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: object) -> None:
        """Take the store, in the worker that will use it."""
        self._store = adapted(store)
        self._has_logged_outage = False
        self._context = None
        self.worker_id = worker_id
        self._store_worker_id = unique_worker_id(self.get_worker_id(), self._worker_token or generate_id(TOKEN_DIGITS))
        self._tracer.init_worker(worker_id, self._store)

    def teardown(self, *args: object, **kwargs: object) -> None:
        self._agent = None
        self._store = None
        self._context = None
        self.worker_id = self._store_worker_id = None
        self._hooks = []
        self._threads.close()
        self._tracer.teardown()
        lifecycle_of(self).become(LifecycleState.STOPPED)

    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        self.worker_id = None
        self._tracer.teardown_worker(worker_id)

    def __getstate__(self) -> dict[str, object]:
        """A copy, here or in another process, is as new: with a tracer of its own, and nothing that runs."""
        kept = {name: value for name, value in vars(self).items() if name not in ("_threads", "_life")}
        return {**kept, "_tracer": copy.copy(self._tracer), "_store": None, "_context": None, "worker_id": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._threads = DaemonThreads("agent")

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
        """The name of this worker; others may have the same."""
        return self.worker_name_of(self.worker_id)

    def worker_name_of(self, number: int | None) -> str:
        """The name of the worker of this number."""
        return f"{self._worker_name}-{'Unknown' if number is None else number}"

    def get_store_worker_id(self) -> str:
        """What the store calls this worker: its name, and what sets it apart from all others, as of `init_worker`."""
        return self._store_worker_id or self.get_worker_id()

    def set_calling_thread(self, thread: CallingThread) -> None:
        """Run a plain agent in this thread, one rollout after the other, until `teardown`."""
        self._threads, self._max_concurrency = thread, 1

    def set_worker_token(self, token: str) -> None:
        """Have the next `init_worker` end the id in the store with this token, by which others recognise it."""
        self._worker_token = token

    # ------------------------------------------------------------------ working off the queue

    async def iter(self, *, event: "ExecutionEvent | None" = None) -> None:
        """Run rollouts of the queue until the event is set, `stop` is called, or `max_rollouts` have been run."""
        lifecycle_of(self).step("start")
        await self._iter_started(event)

    async def _iter_started(self, event: "ExecutionEvent | None" = None) -> None:
        life = lifecycle_of(self)
        try:
            context = self.context
            with self._heartbeat.beating(context.store, context.worker_id, context.running_attempts):
                await self._work_off(event)
        except BaseException as error:
            life.become(LifecycleState.FAILED, error=error)
            raise
        life.end(LifecycleState.READY)
        if life.failure is not None:  # somebody called `error`
            raise life.failure

    async def _work_off(self, event: "ExecutionEvent | None") -> None:
        inner = innermost(self.get_store())
        pool = WorkerPool(
            *(self._max_concurrency, self._max_rollouts),
            claims_ahead=adapted(inner) is inner,  # a foreign store cannot undo claims without a trace
            is_claiming=lambda: self._is_claiming(event),
            run_attempt=self._run_attempt,
            return_claims=self._return_claims,
        )
        try:
            while not self._is_over(event) and (pool.is_busy or not pool.is_spent):
                if not self._is_claiming(event):
                    await pool.return_claims()
                elif pool.room > 0 and not pool.is_spent:
                    await self._claim_for(pool, event)
                    continue
                await pool.change(POLL_SECONDS)
            await pool.finish()
        finally:
            await pool.cancel()

    def _is_claiming(self, event: "ExecutionEvent | None") -> bool:
        return lifecycle_of(self).state is LifecycleState.RUNNING and (event is None or not event.is_set())

    def _is_over(self, event: "ExecutionEvent | None") -> bool:
        is_ending = lifecycle_of(self).state in (LifecycleState.STOPPING, LifecycleState.FAILED)
        return is_ending or (event is not None and event.is_set())

    async def _claim_for(self, pool: WorkerPool, event: "ExecutionEvent | None") -> None:
        """Claim what the pool has room for; wait for a while if there is nothing."""
        waits, is_idle = pool.free > 0, not pool.is_busy
        reserved = pool.reserve(pool.room)
        claims: Sequence[Claim] = []
        is_away = False
        try:
            claims = await self._claim(reserved, event, waits=waits)
            self._has_logged_outage = False
        except StoreUnavailable as error:
            is_away = True
            if not self._has_logged_outage:
                logger.warning("The store cannot be reached (%s); asking again.", error)
            self._has_logged_outage = True
        finally:
            pool.take(claims, reserved=reserved)
        if claims or (waits and not is_away):
            return
        if is_idle:
            await until(lambda: not self._is_claiming(event), timeout_seconds=self._poll_interval)
        else:
            await pool.change(POLL_SECONDS)

    async def _run_attempt(self, claim: Claim, slot: Slot) -> Claim | None:
        context, rollout = self.context, claim.rollout
        number = rollout.attempt.sequence_id
        logger.debug("Rollout %s, attempt %d, is claimed by %s.", rollout.rollout_id, number, context.worker_id)
        attempt = AttemptRun(context, rollout, context.known_resources.of(claim), slot, claim)
        await attempt.run()
        return attempt.following

    async def _return_claims(self, claims: Sequence[Claim]) -> bool:
        """Put claims back into the queue; False if the store cannot take them now, and they are still ours."""
        ids = [(claim.rollout.rollout_id, claim.rollout.attempt.attempt_id) for claim in claims]
        with log_failures(logger, "%d claims could not be given back", len(claims), level=logging.WARNING):
            await self.get_store().return_claims(ids)
            return True
        return False

    async def _claim(self, limit: int, event: "ExecutionEvent | None", *, waits: bool) -> Sequence[Claim]:
        """Rollouts from the head of the queue; the store may wait for some, until we stop claiming."""
        context, wait = self.context, self._poll_interval if waits else None
        known = context.known_resources.versions
        claiming = asyncio.ensure_future(
            context.store.claim_rollouts(limit=limit, worker_id=context.worker_id, known_resources=known, wait=wait)
        )
        try:
            await until(lambda: not self._is_claiming(event), beside=claiming)
        finally:
            if not claiming.done():
                claiming.cancel()  # a claim that is on its way is given back
                await asyncio.wait([claiming])
        return [] if claiming.cancelled() else claiming.result()

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
        self.templates.add(resources)
        resources_id = None if resources is None else (await store.add_resources(resources)).resources_id
        started = await store.start_rollout(
            input=input, mode=mode, resources_id=resources_id, worker_id=self.get_store_worker_id()
        )
        await self._step_impl(started, raise_on_exception=True)
        rollout = await store.get_rollout_by_id(started.rollout_id)
        if rollout is None:
            raise RuntimeError(f"Failed to fetch completed rollout by id after step: {started.rollout_id}")
        return rollout

    @property
    def context(self) -> RunnerContext:
        """What its attempts share."""
        if self._context is None:
            self._context = RunnerContext(
                agent=self.get_agent(),
                store=self.get_store(),
                tracer=self._tracer,
                runner=self,
                threads=self._threads,
                worker_id=self.get_store_worker_id(),
                hooks=self._hooks,
                templates=self.templates,
                failures=self.failures,
            )
        return self._context

    async def _step_impl(self, next_rollout: AttemptedRollout, raise_on_exception: bool = False) -> str:
        attempt = AttemptRun(self.context, next_rollout)
        await attempt.run()
        if raise_on_exception and attempt.error is not None:
            raise attempt.error
        return next_rollout.rollout_id
