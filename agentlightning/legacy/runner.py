"""LegacyAgentRunner: the worker of the v0.1 protocol. It takes a task from a server, runs the agent, posts the result.

A failed rollout is data: what the agent or its callbacks raise is logged, and a result is posted all the same, empty
but for the error in its metadata. Only an interrupted rollout is not reported, so that the server hands it out again.

The first release handed a rollout method the id of the rollout, later ones hand it the rollout itself; the signature
tells which. Of the methods an agent may define, the most fitting one is called, plain or a coroutine, from code with an
event loop and from code without one.
"""

import asyncio
import concurrent.futures
import inspect
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.adapter.base import Adapter
from agentlightning.errors import RolloutFailed
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.results import rollout_from_result
from agentlightning.litagent import LitAgent
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.litagent.litagent import is_v0_1_rollout_api
from agentlightning.runner.attempt import last_trace
from agentlightning.runner.failures import FailureNote
from agentlightning.tracer import Tracer
from agentlightning.types import (
    NamedResources,
    ParallelWorkerBase,
    RolloutLegacy,
    RolloutMode,
    Span,
    Task,
    TaskInput,
    Triplet,
)
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import run_in_loop

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

ERROR: Final = "error"
"""Metadata key of a result that says why there is none."""
_TRAINING: Final = ("training_rollout", "rollout")
_OTHERS: Final = ("validation_rollout", "rollout", "training_rollout")
"""In the first release, an agent that only said how to train validated in the same way."""


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
        agent.set_runner(self)

    # ------------------------------------------------------------------ tasks

    def run(self) -> bool:
        """Wait for one task and do it; False if it has no resources, or the client was closed meanwhile."""
        outcome = self._begun(self.client.poll_next_task())
        if outcome is None:
            return False
        with self.tracer._trace_context_sync(name=outcome.trace_name), outcome.recorded():
            outcome.result = call_plainly(self.agent, outcome.task, outcome.resources)
        self._post(outcome)
        return True

    async def run_async(self) -> bool:
        """As `run`."""
        task = await self.client.poll_next_task_async()
        outcome = await asyncio.to_thread(self._begun, task)
        if outcome is None:
            return False
        async with self.tracer.trace_context(name=outcome.trace_name):
            with outcome.recorded():
                outcome.result = await call_on_loop(self.agent, outcome.task, outcome.resources)
        await asyncio.to_thread(self._post, outcome)
        return True

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
        return not _is_closed(self.client) and (self.max_tasks is None or count < self.max_tasks)

    # ------------------------------------------------------------------ around the agent

    def _begun(self, task: Task | None) -> "_Outcome | None":
        """A task with its resources, of which the agent has been told; None without either."""
        if task is None:
            return None
        by_id = task.resources_id
        update = self.client.get_latest_resources() if by_id is None else self.client.get_resources_by_id(by_id)
        if update is None:
            wanted = "the latest resources" if by_id is None else f"resources '{by_id}'"
            text = "%s: %s of rollout %s cannot be had, so it is left to the server."
            logger.error(text, self._name, wanted, task.rollout_id)
            return None
        self._tell_agent("on_rollout_start", task)
        return _Outcome(task, update.resources)

    def _post(self, outcome: "_Outcome") -> None:
        try:
            answer = self.client.post_rollout(self._ended(outcome))
        except (TypeError, ValueError) as error:
            outcome.error = error
            logger.error("The result of rollout %s cannot be written: %s", outcome.task.rollout_id, error)
            answer = self.client.post_rollout(outcome.failed())
        if answer is None:
            text = "%s: the result of rollout %s did not reach the server."
            logger.error(text, self._name, outcome.task.rollout_id)
        else:
            logger.info("%s: rollout %s is done.", self._name, outcome.task.rollout_id)

    def _ended(self, outcome: "_Outcome") -> RolloutLegacy:
        """What is posted; the agent has been told of it."""
        rollout: RolloutLegacy | None = None
        if outcome.error is None:
            with outcome.recorded():
                rollout = self._to_rollout_object(outcome.result, outcome.task.rollout_id, outcome.task)
        rollout = rollout or outcome.failed()
        self._tell_agent("on_rollout_end", outcome.task, rollout)
        return rollout

    def _tell_agent(self, name: str, *arguments: object) -> None:
        with log_failures(logger, "%s.%s failed.", type(self.agent).__name__, name):
            getattr(self.agent, name)(*arguments, self, self.tracer)

    @property
    def _name(self) -> str:
        return "Worker-Unknown" if self.worker_id is None else f"Worker-{self.worker_id}"

    # ------------------------------------------------------------------ results

    def _to_rollout_object(self, result: object, rollout_id: str, task: Task | None = None) -> RolloutLegacy:
        """What the agent returned, with what it leaves out taken from its trace."""
        rollout = rollout_from_result(task or Task(rollout_id=rollout_id, input=None), result)
        spans = _returned_spans(result) or last_trace(self.tracer)
        triplets = rollout.triplets if rollout.triplets is not None else self._triplets(spans)
        reward = rollout.final_reward
        if reward is None and triplets:
            reward = triplets[-1].reward
        if reward is None:
            reward = final_reward_of(spans)
        changes = {"trace": rollout.trace or _entries(spans), "triplets": triplets, "final_reward": reward}
        if task is None and not isinstance(result, RolloutLegacy):
            changes["task"] = None
        return rollout.model_copy(update=changes)

    def _triplets(self, spans: Sequence[ReadableSpan | Span]) -> list[Triplet] | None:
        adapter = type(self.triplet_exporter).__name__
        if spans:
            with log_failures(logger, "%s could not read a trace.", adapter):  # which is posted all the same
                triplets = list(self.triplet_exporter.adapt(spans))
                if all(isinstance(triplet, Triplet) for triplet in triplets):
                    return triplets
                logger.warning("%s makes no triplets, so none are posted.", adapter)
        return None


@dataclass
class _Outcome:
    """How a task went."""

    task: Task
    resources: NamedResources
    result: object = None
    error: BaseException | None = None

    @property
    def trace_name(self) -> str:
        return f"rollout_{self.task.rollout_id}"

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What is raised inside becomes the error; an interruption is none."""
        try:
            yield
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # a failed rollout is data: it is posted
            self.error = error
            logger.exception("Rollout %s failed.", self.task.rollout_id)

    def failed(self) -> RolloutLegacy:
        """A result that says only why there is none."""
        rollout = RolloutLegacy(rollout_id=self.task.rollout_id, task=self.task)
        if self.error is not None:
            rollout.metadata[ERROR] = FailureNote.of(self.error).as_metadata()
        return rollout


def _is_closed(client: AgentLightningClient) -> bool:
    closed = getattr(client, "_closed", None)  # what only looks like a client has none
    return isinstance(closed, threading.Event) and closed.is_set()


def _returned_spans(result: object) -> Sequence[ReadableSpan | Span]:
    """The spans an agent returned; none if it returned something else."""
    items = list(result) if isinstance(result, (list, tuple)) else []
    return items if all(isinstance(item, (ReadableSpan, Span)) for item in items) else []


def _entries(spans: Sequence[ReadableSpan | Span]) -> list[JsonObject] | None:
    """Spans as the protocol writes them; those of ours have been written by then."""
    return [json.loads(span.to_json()) for span in spans if isinstance(span, ReadableSpan)] or None


# ---------------------------------------------------------------------- calling an agent of any release


def rollout_method(agent: LitAgent[TaskInput], mode: RolloutMode | None, *, prefers_async: bool) -> Callable[..., Any]:
    """The method that does a task of this mode: the first one the agent defines itself."""
    if isinstance(agent, FunctionalLitAgent):  # defines both, of which only one works
        prefers_async = agent.is_async()
    suffixes = ("_async", "") if prefers_async else ("", "_async")
    for name in _TRAINING if mode == "train" else _OTHERS:
        for full_name in [name + suffix for suffix in suffixes]:
            method: Callable[..., object] | None = getattr(agent, full_name, None)
            if method is not None and getattr(method, "__func__", method) is not getattr(LitAgent, full_name):
                return method
    return agent.rollout  # which says what is missing


def call_plainly(agent: LitAgent[TaskInput], task: Task, resources: NamedResources) -> object:
    """What the agent returns; a coroutine runs on an event loop of its own."""
    method = rollout_method(agent, task.mode, prefers_async=False)
    try:
        result: object = method(task.input, **_arguments(method, task, resources))
        if not inspect.iscoroutine(result):
            return result
        return run_in_loop(_contained(result))
    except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
        raise RolloutFailed("The agent was cancelled from within: something it awaited was cancelled.") from error


async def call_on_loop(agent: LitAgent[TaskInput], task: Task, resources: NamedResources) -> object:
    """As `call_plainly`, on the running loop; a plain method runs in a thread, so that others go on."""
    method = rollout_method(agent, task.mode, prefers_async=True)
    work = asyncio.ensure_future(_contained(_called(method, task, resources)))
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait([work])
        raise
    if work.cancelled():
        raise RolloutFailed("The agent was cancelled from within: something it awaited was cancelled.")
    return work.result()


async def _called(method: Callable[..., object], task: Task, resources: NamedResources) -> object:
    arguments = _arguments(method, task, resources)
    if inspect.iscoroutinefunction(method):
        result: object = await method(task.input, **arguments)
    else:
        result = await asyncio.to_thread(method, task.input, **arguments)
    return await result if inspect.iscoroutine(result) else result


async def _contained(work: Any) -> object:
    """Out of a task these two would end the event loop, and with it everything else that runs there."""
    try:
        result: object = await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RolloutFailed(f"The agent raised {type(error).__name__}: {error}") from error
    return result


def _arguments(method: Callable[..., object], task: Task, resources: NamedResources) -> JsonObject:
    if is_v0_1_rollout_api(method):
        return {"rollout_id": task.rollout_id, "resources": resources}
    return {"resources": resources, "rollout": RolloutLegacy(rollout_id=task.rollout_id, task=task)}
