"""LitAgentRunner: runs an agent on rollouts from the queue, one after the other or many at once."""

import asyncio
import copy
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.litagent import LitAgent
from agentlightning.litagent.invocation import AgentMethod, RolloutMethod, method_of
from agentlightning.runner.attempt import LEAVING_SECONDS, AttemptRun, KnownResources
from agentlightning.runner.base import Runner
from agentlightning.runner.failures import FailureLog
from agentlightning.runner.heartbeat import Heartbeat, LaunchMode
from agentlightning.runner.slots import ClaimQueue, Slot
from agentlightning.store.base import LightningStore
from agentlightning.store.claims import Claim
from agentlightning.tracer import Tracer
from agentlightning.types import Hook, NamedResources, Rollout, RolloutMode
from agentlightning.types.lifecycle import LifecycleState, lifecycle_of
from agentlightning.types.resources import TrustedTemplates
from agentlightning.utils.daemon_threads import CallingThread, DaemonThreads
from agentlightning.utils.deadline import until
from agentlightning.utils.id import generate_id
from agentlightning.utils.id import worker_id as unique_worker_id
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from agentlightning.execution.events import ExecutionEvent

__all__ = ["LitAgentRunner"]

logger = logging.getLogger(__name__)

T_task = TypeVar("T_task")

TOKEN_DIGITS: Final = 8
SHORTEST_POLL_SECONDS: Final = 0.01
"""Polling more often keeps a processor busy."""


@suggests_arguments
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
        self._given_worker_id: str | None = None
        self._store_worker_id: str | None = None
        self._agent: LitAgent[T_task] | None = agent
        self._store: LightningStore | None = None
        self.hooks: list[Hook] = []
        self._has_logged_outage = False
        self.known_resources = KnownResources()
        """Which resources the store need not send again."""
        self.attempts: dict[str, AttemptRun] = {}
        """What runs now, by attempt id."""
        self.threads: DaemonThreads = DaemonThreads("agent")
        """In which plain agents run."""
        self._methods: dict[RolloutMethod, AgentMethod] = {}
        self._claim_counter = itertools.count()

    # ------------------------------------------------------------------ life cycle

    def init(
        self, agent: LitAgent[T_task] | None = None, *, hooks: Sequence[Hook] | None = None, **kwargs: object
    ) -> None:
        """Take the agent and the hooks."""
        self._agent = agent if agent is not None else self._agent
        self.get_agent().set_runner(self)
        self._methods = {}
        self.hooks = list(hooks or [])
        self._tracer.init()
        lifecycle_of(self).step("init")

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: object) -> None:
        """Take the store, in the worker that will use it."""
        self._store = store
        self._has_logged_outage = False
        self.known_resources = KnownResources()
        self.worker_id = worker_id
        self._claim_counter = itertools.count()
        self._store_worker_id = self._given_worker_id or unique_worker_id(
            self.get_worker_id(), generate_id(TOKEN_DIGITS)
        )
        self._tracer.init_worker(worker_id, self._store)

    def teardown(self, *args: object, **kwargs: object) -> None:
        self._agent = None
        self._store = None
        self._methods = {}
        self.worker_id = self._store_worker_id = None
        self.hooks = []
        self.threads.close()
        self._tracer.teardown()
        lifecycle_of(self).become(LifecycleState.STOPPED)

    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        self.worker_id = None
        self._tracer.teardown_worker(worker_id)

    def __getstate__(self) -> dict[str, object]:
        """A copy, here or in another process, is as new: with a tracer of its own, and nothing that runs."""
        kept = {name: value for name, value in vars(self).items() if name not in ("threads", "_claim_counter", "_life")}
        fresh: dict[str, object] = {"_store": None, "worker_id": None, "attempts": {}, "_methods": {}}
        return {**kept, **fresh, "_tracer": copy.copy(self._tracer)}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.threads = DaemonThreads("agent")

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
        self.threads, self._max_concurrency = thread, 1

    def set_store_worker_id(self, worker_id: str) -> None:
        """Have the next `init_worker` take this id in the store, which the process that started it knows."""
        self._given_worker_id = worker_id

    # ------------------------------------------------------------------ working off the queue

    async def iter(self, *, event: "ExecutionEvent | None" = None) -> None:
        """Run rollouts of the queue until the event is set, `stop` is called, or `max_rollouts` have been run."""
        lifecycle_of(self).step("start")
        await self._iter_started(event)

    async def _iter_started(self, event: "ExecutionEvent | None" = None) -> None:
        life, loop = lifecycle_of(self), asyncio.get_running_loop()

        def lose(ids: Sequence[tuple[str, str]]) -> None:
            loop.call_soon_threadsafe(self._revoke, ids)

        try:
            store, worker_id = self.get_store(), self.get_store_worker_id()
            with self._heartbeat.beating(store, worker_id, self.running_attempts, lose):
                await self._work_off(event)
        except BaseException as error:
            life.become(LifecycleState.FAILED, error=error)
            raise
        life.end(LifecycleState.READY)
        if life.failure is not None:  # somebody called `error`
            raise life.failure

    async def _work_off(self, event: "ExecutionEvent | None") -> None:
        queue = ClaimQueue(
            lambda slot, count: self._claim(slot, count, event),
            quota=self._max_rollouts,
            counter=self._claim_counter,
            is_claiming=lambda: self._is_claiming(event),
            is_over=lambda: self._is_over(event),
        )
        slots = [Slot(number, queue) for number in range(self._max_concurrency)]
        tasks = [asyncio.create_task(self._run_slot(slot)) for slot in slots]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            while not all(task.done() for task in tasks):
                with suppress(asyncio.CancelledError):  # whoever ends the loop cancels each task of it
                    await asyncio.wait(tasks)
            if queue.claims or any(slot.has_open_claim for slot in slots):
                await self._return_claims()
        for task in tasks:
            if not task.cancelled():
                task.result()

    def _is_claiming(self, event: "ExecutionEvent | None") -> bool:
        return lifecycle_of(self).state is LifecycleState.RUNNING and (event is None or not event.is_set())

    def _is_over(self, event: "ExecutionEvent | None") -> bool:
        is_ending = lifecycle_of(self).state in (LifecycleState.STOPPING, LifecycleState.FAILED)
        return is_ending or (event is not None and event.is_set())

    async def _run_slot(self, slot: Slot) -> None:
        claim = await slot.queue.next_claim(slot)
        while claim is not None:
            rollout, number = claim.rollout, claim.rollout.attempt.sequence_id
            logger.debug("Rollout %s, attempt %d, is claimed by %s.", rollout.rollout_id, number, self._store_worker_id)
            claim = await AttemptRun(
                self, rollout, self.known_resources.of(claim), claim, slot
            ).run() or await slot.queue.next_claim(slot)

    async def _claim(self, slot: Slot, limit: int, event: "ExecutionEvent | None") -> Sequence[Claim]:
        """Rollouts from the head of the queue, for which the store waits; none while the store is away, or we pause."""
        if not self._is_claiming(event):
            await until(lambda: self._is_claiming(event) or self._is_over(event))
            return ()
        store, options = self.get_store(), {**self.claim_options(), "limit": limit, "wait": self._poll_interval}
        claiming = asyncio.ensure_future(
            slot.claim(lambda claim_id: store.claim_rollouts(**options, claim_id=claim_id))
        )
        try:
            await until(lambda: not self._is_claiming(event), beside=claiming)
        finally:
            if not claiming.done():
                claiming.cancel()
                await asyncio.wait([claiming])
        try:
            claims = () if claiming.cancelled() else claiming.result()
            self._has_logged_outage = False
        except ConnectionError as error:
            if not self._has_logged_outage:
                logger.warning("The store cannot be reached (%s); asking again.", error)
            self._has_logged_outage = True
            await until(lambda: not self._is_claiming(event), timeout_seconds=self._poll_interval)
            return ()
        return claims

    def claim_options(self) -> dict[str, Any]:
        """What every claim says of this worker."""
        return {
            "worker_id": self.get_store_worker_id(),
            "heartbeat_interval": self._heartbeat.interval_seconds,
            "known_resources": self.known_resources.versions,
        }

    async def _return_claims(self) -> None:
        """Let others have what the store gave, or may have given, and no agent runs."""
        losing = self.get_store().mark_worker_lost(self.get_store_worker_id(), "the runner stopped")
        with log_failures(logger, "What was claimed last could not be given back", level=logging.WARNING):
            await asyncio.wait_for(losing, LEAVING_SECONDS)

    def running_attempts(self) -> list[tuple[str, str]]:
        """Ids of rollout and attempt of all that runs now; may be called in any thread."""
        return [(attempt.rollout.rollout_id, attempt_id) for attempt_id, attempt in tuple(self.attempts.items())]

    def _revoke(self, ids: Sequence[tuple[str, str]]) -> None:
        for _, attempt_id in ids:
            if attempt_id in self.attempts:
                self.attempts[attempt_id].revoke()

    def method_for(self, mode: RolloutMode | None) -> AgentMethod:
        """What to call of the agent for a rollout of this mode."""
        name: RolloutMethod = "training_rollout" if mode == "train" else "validation_rollout"
        if name not in self._methods:
            self._methods[name] = method_of(self.get_agent(), name)
        return self._methods[name]

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
        attempt = AttemptRun(self, started)
        await attempt.run()
        if attempt.error is not None:
            raise attempt.error
        rollout = await store.get_rollout_by_id(started.rollout_id)
        if rollout is None:
            raise RuntimeError(f"Failed to fetch completed rollout by id after step: {started.rollout_id}")
        return rollout
