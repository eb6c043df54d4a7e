"""LegacyAgentRunner: the worker of the v0.1 protocol. It takes a task from a server, runs the agent, posts the result.

A failed rollout is data: what the agent or its callbacks raise is logged, and a result is posted all the same, empty
but for the error in its metadata. Only an interrupted rollout is not reported, so that the server hands it out again.

The first release handed a rollout method the id of the rollout, later ones hand it the rollout itself; the signature
tells which. Coroutines run in an event loop; plain methods run in the thread that called `run`, or beside the loop of
`run_async`.
"""

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any, Final

from agentlightning.adapter.base import Adapter
from agentlightning.errors import RolloutFailed
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.results import entry_from_span, rollout_from_result
from agentlightning.litagent import LitAgent
from agentlightning.litagent.invocation import AgentMethod, call_callback, method_of
from agentlightning.litagent.litagent import is_v0_1_rollout_api
from agentlightning.runner.attempt import last_trace
from agentlightning.runner.failures import FailureNote
from agentlightning.runner.results import holds_spans
from agentlightning.tracer import Tracer
from agentlightning.types import NamedResources, ParallelWorkerBase, RolloutLegacy, Task, TaskInput, Triplet
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.daemon_threads import CallingThread, DaemonThreads
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import LoopThread

logger = logging.getLogger(__name__)

ERROR: Final = "error"
"""Metadata key of a result that says why there is none."""


class LegacyAgentRunner(ParallelWorkerBase):
    """Runs an agent on the tasks of an `AgentLightningServer`. New code uses `LitAgentRunner` and a store."""

    def __init__(
        self,
        agent: LitAgent[TaskInput],
        client: AgentLightningClient,
        tracer: Tracer,
        triplet_exporter: Adapter[Any, Any],
        worker_id: int | None = None,
        max_tasks: int | None = None,
    ) -> None:
        """Nothing is asked for yet.

        Args:
            agent: Of any release.
            tracer: Records what the agent does; its `init_worker` is the caller's to call.
            triplet_exporter: Turns spans into triplets.
            max_tasks: After how many tasks `iter` ends; None goes on until the client is closed.
        """
        deprecated("LegacyAgentRunner speaks the v0.1 protocol, which is deprecated; use LitAgentRunner with a store.")
        super().__init__()
        self.agent = agent
        self.client = client
        self.tracer = tracer
        self.triplet_exporter = triplet_exporter
        self.worker_id = worker_id
        self.max_tasks = max_tasks
        self._threads = DaemonThreads("agl-legacy-agent")
        agent.set_runner(self)

    # ------------------------------------------------------------------ tasks

    def run(self) -> bool:
        """Wait for one task and do it; False if it has no resources, or the client was closed meanwhile."""
        task, loop, here = self.client.poll_next_task(), LoopThread("agl-legacy-runner"), CallingThread()

        async def do_unless_interrupted() -> bool:
            with contextlib.suppress(asyncio.CancelledError):
                return await self._do(task, here)
            return False

        def interrupt() -> None:
            loop.stop()

        try:
            return here.wait_for(lambda: loop.run(do_unless_interrupted()), interrupt)
        finally:
            loop.stop()

    async def run_async(self) -> bool:
        """As `run`."""
        return await self._do(await self.client.poll_next_task_async(), self._threads)

    def iter(self) -> int:
        """Do one task after the other; how many were done."""
        count = 0
        while self._goes_on(count):
            count += self.run()
        return count

    async def iter_async(self) -> int:
        """As `iter`."""
        count = 0
        while self._goes_on(count):
            count += await self.run_async()
        return count

    def _goes_on(self, count: int) -> bool:
        closed = getattr(self.client, "_closed", None)  # what only looks like a client has none
        is_closed = isinstance(closed, threading.Event) and closed.is_set()
        return not is_closed and (self.max_tasks is None or count < self.max_tasks)

    async def _do(self, task: Task | None, threads: DaemonThreads) -> bool:
        """Do a task, from its resources to its result."""
        resources = None if task is None else await asyncio.to_thread(self._resources_of, task)
        if task is None or resources is None:
            return False
        await call_callback(self.agent, "on_rollout_start", task, self, self.tracer)
        try:
            async with self.tracer.trace_context(name=f"rollout_{task.rollout_id}"):
                result = await _call_agent(self.agent, task, resources, threads)
            rollout = self._rollout_of(task, result)
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 # a failed rollout is data: it is posted
            rollout = _failed(task, error)
        await call_callback(self.agent, "on_rollout_end", task, rollout, self, self.tracer)
        try:
            answer = await asyncio.to_thread(self.client.post_rollout, rollout)
        except (TypeError, ValueError) as error:  # JSON cannot hold it
            answer = await asyncio.to_thread(self.client.post_rollout, _failed(task, error))
        if answer is None:
            logger.error(
                "Worker %s: the result of rollout %s did not reach the server.", self.worker_id, task.rollout_id
            )
        else:
            logger.info("Worker %s: rollout %s is done.", self.worker_id, task.rollout_id)
        return True

    def _resources_of(self, task: Task) -> NamedResources | None:
        """What the task names, or else the latest; None if they cannot be had."""
        by_id = task.resources_id
        update = self.client.get_latest_resources() if by_id is None else self.client.get_resources_by_id(by_id)
        if update is not None:
            return update.resources
        wanted = "the latest resources" if by_id is None else f"resources '{by_id}'"
        text = "Worker %s: %s of rollout %s cannot be had, so it is left to the server."
        logger.error(text, self.worker_id, wanted, task.rollout_id)
        return None

    # ------------------------------------------------------------------ results

    def _rollout_of(self, task: Task, result: object) -> RolloutLegacy:
        """What the agent returned, with what it leaves out taken from its trace."""
        rollout = rollout_from_result(task, result)
        spans: Sequence[Any] = result if isinstance(result, list) and result and holds_spans(result) else []
        spans = spans or last_trace(self.tracer)
        triplets = rollout.triplets if rollout.triplets is not None else self._triplets(spans)
        reward = rollout.final_reward
        if reward is None and triplets:
            reward = triplets[-1].reward
        if reward is None:
            reward = final_reward_of(spans)
        trace = rollout.trace or [entry_from_span(span) for span in spans] or None
        return rollout.model_copy(update={"trace": trace, "triplets": triplets, "final_reward": reward})

    def _triplets(self, spans: Sequence[Any]) -> list[Triplet] | None:
        adapter = type(self.triplet_exporter).__name__
        with log_failures(logger, "%s could not read a trace.", adapter):  # which is posted all the same
            triplets = list(self.triplet_exporter.adapt(spans)) if spans else None
            if triplets is None or all(isinstance(triplet, Triplet) for triplet in triplets):
                return triplets
            logger.warning("%s makes no triplets, so none are posted.", adapter)
        return None


def _failed(task: Task, error: BaseException) -> RolloutLegacy:
    """A result that says only why there is none."""
    logger.error("Rollout %s failed.", task.rollout_id, exc_info=error)
    metadata = {ERROR: FailureNote.of(error).as_metadata()}
    return RolloutLegacy(rollout_id=task.rollout_id, task=task, metadata=metadata)


# ---------------------------------------------------------------------- calling an agent of any release


def rollout_method(agent: LitAgent[TaskInput], mode: str | None) -> AgentMethod:
    """The method that does a task of this mode; an agent that only says how to train validates in the same way."""
    validating = ("validation_rollout", "validation_rollout_async", "rollout", "rollout_async")
    trains = mode == "train" or not any(map(agent.overrides, validating))
    return method_of(agent, "training_rollout" if trains else "validation_rollout")


async def _call_agent(
    agent: LitAgent[TaskInput], task: Task, resources: NamedResources, threads: DaemonThreads
) -> object:
    """What the agent returns; what it raises to end a program ends its own rollout alone."""
    method = rollout_method(agent, task.mode)
    arguments: JsonObject = {"resources": resources}
    if is_v0_1_rollout_api(method.call):
        arguments["rollout_id"] = task.rollout_id
    else:
        arguments["rollout"] = RolloutLegacy(rollout_id=task.rollout_id, task=task)
    call = functools.partial(method.call, task.input, **arguments)
    work = asyncio.ensure_future(_contained(call() if method.is_coroutine else threads.run(call)))
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait([work])
        raise
    if work.cancelled():
        raise RolloutFailed("The agent was cancelled from within: something it awaited was cancelled.")
    return work.result()


async def _contained(work: Any) -> object:
    """Out of a task these two would end the event loop, and with it everything else that runs there."""
    try:
        result: object = await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RolloutFailed(f"The agent raised {type(error).__name__}: {error}") from error
    return result
