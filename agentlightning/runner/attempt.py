"""One attempt, from its claim to its status: resources, hooks, the trace, the agent, its result.

What the agent raises is recorded on the attempt; what we get wrong is raised. Whatever happens, the attempt gets a
status: an attempt that nobody answers for would keep its rollout waiting.
"""

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.emitter import emit_exception
from agentlightning.errors import AttemptTimedOut, NoActiveTracer, RolloutFailed, WorkerLost
from agentlightning.litagent import LitAgent
from agentlightning.litagent.invocation import AgentMethod, call_agent, call_callback, method_of, with_claimed_keys
from agentlightning.litagent.litagent import working_for
from agentlightning.llm_proxy.flush import are_recorded, flush_calls
from agentlightning.runner.failures import FailureLog, FailureNote
from agentlightning.runner.pool import LEAVING_SECONDS, Slot
from agentlightning.runner.results import hint_at_output, holds_spans, record_result, store_returned_spans
from agentlightning.store.base import UNSET, LightningStore, Unset
from agentlightning.store.claims import Claim, ResourcesVersion
from agentlightning.store.values import own_resources
from agentlightning.tracer import Tracer
from agentlightning.tracer.recording import LastSpans, RecordingTracer
from agentlightning.types import (
    AttemptedRollout,
    AttemptStatus,
    Hook,
    NamedResources,
    ProxyLLM,
    RolloutRawResult,
    Task,
)
from agentlightning.types.core import TASK_ROW
from agentlightning.types.resources import TrustedTemplates
from agentlightning.utils.daemon_threads import DaemonThreads

__all__ = ["AttemptRun", "KnownResources", "RunnerContext"]

logger = logging.getLogger(__name__)

CANCEL_SECONDS: Final = 5.0
"""How long an agent that was cancelled may take to end before it is left behind."""


MOST_KNOWN_RESOURCES: Final = 8


class KnownResources:
    """Versions of resources that a runner used last, so that the store need not send them with every claim."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ResourcesVersion, NamedResources] = OrderedDict()

    @property
    def versions(self) -> list[ResourcesVersion]:
        return list(self._kept)

    def of(self, claim: Claim) -> NamedResources | None:
        """The resources of a claim, copied for the caller; None if there are none, or they are not kept."""
        version = claim.version
        if version is None:
            return None
        if claim.resources is not None:
            self._kept[version] = claim.resources.resources
        kept = self._kept.get(version)
        if kept is None:
            return None
        self._kept.move_to_end(version)
        while len(self._kept) > MOST_KNOWN_RESOURCES:
            self._kept.popitem(last=False)
        return own_resources(kept)


@dataclass
class RunnerContext:
    """What all attempts of a runner share."""

    agent: LitAgent[Any]
    store: LightningStore
    tracer: Tracer
    runner: Any
    threads: DaemonThreads
    worker_id: str
    hooks: Sequence[Hook] = ()
    known_resources: KnownResources = field(default_factory=KnownResources)
    templates: TrustedTemplates = field(default_factory=TrustedTemplates)
    failures: FailureLog = field(default_factory=FailureLog)
    running: dict[str, str] = field(default_factory=dict)
    """Rollouts by the attempts that run now."""

    def running_attempts(self) -> list[tuple[str, str]]:
        """Ids of rollout and attempt of all that runs now; may be called in any thread."""
        return [(rollout_id, attempt_id) for attempt_id, rollout_id in tuple(self.running.items())]

    @functools.cached_property
    def training_method(self) -> AgentMethod:
        return method_of(self.agent, "training_rollout")

    @functools.cached_property
    def validation_method(self) -> AgentMethod:
        return method_of(self.agent, "validation_rollout")

    @functools.cached_property
    def can_finish_in_one_step(self) -> bool:
        """Whether nobody reads the store between the end of a trace and the status of its attempt."""
        return (
            not self.hooks
            and not self.agent.has_callback("on_rollout_end")
            and getattr(type(self.tracer), "trace_context", None) is RecordingTracer.trace_context
        )


@dataclass
class AttemptRun:
    """One attempt that is being run."""

    context: RunnerContext
    rollout: AttemptedRollout
    resources: NamedResources | None = None
    """As they came with the claim; None if the store must be asked."""
    slot: Slot | None = None
    """Of the agent in the pool; None for an attempt beside the queue."""
    claim: Claim | None = None
    """By which the runner got the attempt, with its credentials; None for an attempt beside the queue."""
    following: Claim | None = None
    """What was claimed in the step that finished this attempt."""
    error: BaseException | None = None
    """What made it fail."""
    spans: Sequence[Any] = field(default_factory=list)
    _output: Any | Unset = UNSET
    """What the rollout is to keep of the agent's result; UNSET leaves what it has."""
    _last: LastSpans = field(default_factory=LastSpans)
    _has_begun: bool = False
    """Whether the agent and the hooks were told that it begins."""
    _proxies: list[ProxyLLM] = field(default_factory=list)
    """Through which the agent's model calls may have gone."""
    _lost_calls: dict[str, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Run the agent and write the attempt's status; what made it fail is in `error`."""
        running, attempt_id = self.context.running, self.rollout.attempt.attempt_id
        running[attempt_id] = self.rollout.rollout_id
        try:
            with working_for(self.context.runner, self.claim, self.context.threads):
                await self._run_and_report()
        finally:
            running.pop(attempt_id, None)

    async def _run_and_report(self) -> None:
        status: AttemptStatus = "failed"
        is_claiming = True
        patience: float | None = None
        try:
            status = await self._run()
        except asyncio.CancelledError:
            status, is_claiming = "unresponsive", False  # the runner leaves: it is not the agent's fault
            patience = LEAVING_SECONDS
            self.error = WorkerLost("The runner was stopped while the agent was running.")
            raise
        except KeyboardInterrupt as error:
            self.error, is_claiming = error, False
            raise
        except BaseException as error:  # noqa: BLE001 # a failed rollout is data: it is recorded on the attempt
            self.error = error
            status = "timeout" if isinstance(error, AttemptTimedOut) else "failed"
            self.context.failures.add(self.rollout.rollout_id, error)
        finally:
            try:
                if self._proxies and status != "unresponsive" and not are_recorded(self.spans):
                    await self._flush_calls()
                if self._has_begun:
                    await self._call_agent_callback("on_rollout_end", self.rollout)
                    await self._call_hooks("on_rollout_end", spans=self.spans)
            finally:
                await self._write_status(status, patience, is_claiming=is_claiming)

    async def _run(self) -> AttemptStatus:
        found = self.resources if self.resources is not None else await self._stored_resources()
        resources = self.context.templates.apply(with_claimed_keys(found))
        self._proxies = [resource for resource in resources.values() if isinstance(resource, ProxyLLM)]
        self._has_begun = True
        await self._call_agent_callback("on_rollout_start")
        await self._call_hooks("on_rollout_start")
        try:
            async with self._trace_context() as trace:
                if isinstance(trace, LastSpans):
                    self._last = trace
                result = await self._traced(resources)
        finally:
            self.spans = _last_trace(self.context.tracer)
        if holds_spans(result):
            await self._store_last_spans()
            self.spans = await store_returned_spans(result, self.rollout, self.context.store, self.spans)
        if not isinstance(self._output, Unset):
            hint_at_output(result, self.spans)
        elif self.rollout.output is not None:
            self._output = None  # an earlier attempt's, which this success replaces
        return "succeeded"

    def _trace_context(self) -> AbstractAsyncContextManager[Any]:
        """A trace whose last spans are stored with the status, where nobody reads the store in between."""
        tracer, store, rollout = self.context.tracer, self.context.store, self.rollout
        target: Any = {"store": store, "rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        if self.context.can_finish_in_one_step and isinstance(tracer, RecordingTracer):
            return tracer.attempt_context(**target)
        return tracer.trace_context(name=rollout.rollout_id, **target)

    async def _traced(self, resources: NamedResources) -> RolloutRawResult:
        """What the agent returned; rewards, or what it raised, are recorded in the trace."""
        await self._call_hooks("on_trace_start", tracer=self.context.tracer)
        logger.debug(
            "Rollout %s: the agent starts with %s.", self.rollout.rollout_id, list(resources) or "no resources"
        )
        try:
            result = await self._call_agent(resources)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            with contextlib.suppress(NoActiveTracer):
                emit_exception(error)
            raise
        finally:
            await self._call_hooks("on_trace_end", tracer=self.context.tracer)
        self._output = await record_result(result, self.rollout, self.context.store)
        return result

    # ------------------------------------------------------------------ what it needs

    async def _stored_resources(self) -> NamedResources:
        """The resources that the rollout names or, if it names none, the latest; empty if there are none."""
        resources_id, store = self.rollout.resources_id, self.context.store
        if resources_id is None:
            if self.claim is not None and self.claim.version is None:
                return {}  # the claim would have brought some
            latest = await store.get_latest_resources()
            return {} if latest is None else latest.resources
        named = await store.get_resources_by_id(resources_id)
        if named is None:
            raise RolloutFailed(
                f"Resources '{resources_id}' are missing, so rollout '{self.rollout.rollout_id}' cannot run; publish "
                "them with store.update_resources, or enqueue it with the id of others."
            )
        return named.resources

    # ------------------------------------------------------------------ the agent

    async def _call_agent(self, resources: NamedResources) -> RolloutRawResult:
        """Run the agent for as long as the rollout allows."""
        loop, limit = asyncio.get_running_loop(), self.rollout.config.timeout_seconds
        # Settled by the agent's task itself, or by the clock: to wait for the task takes the loop another round.
        is_over = loop.create_future()
        work = loop.create_task(self._work(resources, is_over))
        timer = None if limit is None else loop.call_later(limit, _settle, is_over)
        try:
            await is_over
        except asyncio.CancelledError:
            await _end(work)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not work.done():
            await _end(work)
            raise AttemptTimedOut(f"The agent did not finish within {limit:g} s.")
        if work.cancelled():
            raise RolloutFailed("The agent was cancelled from within: something it awaited raised CancelledError.")
        return work.result()

    async def _work(self, resources: NamedResources, is_over: "asyncio.Future[None]") -> RolloutRawResult:
        rollout, context = self.rollout, self.context
        # A rollout that was enqueued as a `Task` reaches the agent as one.
        is_task = type(rollout.input) is Task or isinstance((rollout.metadata or {}).get(TASK_ROW), dict)
        try:
            return await call_agent(
                context.training_method if rollout.mode == "train" else context.validation_method,
                task=Task.of_rollout(rollout) if is_task else rollout.input,
                resources=resources,
                rollout=rollout,
                threads=context.threads,
            )
        except (SystemExit, KeyboardInterrupt) as error:
            # Out of a task these would end the event loop, and with it every other rollout.
            raise RolloutFailed(f"The agent raised {type(error).__name__}: {error}") from error
        finally:
            end_attempt = functools.partial(_settle, is_over)
            end_attempt() if self.slot is None else self.slot.release(end_attempt)

    # ------------------------------------------------------------------ hooks and status

    async def _call_hooks(self, name: str, **arguments: Any) -> None:
        for hook in self.context.hooks:
            try:
                callback: Callable[..., Awaitable[None]] = getattr(hook, name)
                await callback(agent=self.context.agent, runner=self.context.runner, rollout=self.rollout, **arguments)
            except (Exception, SystemExit):  # a hook's fault is not the agent's
                logger.exception("Hook %s.%s failed.", type(hook).__name__, name)

    async def _call_agent_callback(self, name: str, *outcome: Any) -> None:
        """Call the agent's own callback, if it has one."""
        if not self.context.agent.has_callback(name):
            return
        task = Task.of_rollout(self.rollout)
        await call_callback(self.context.agent, name, task, *outcome, self.context.runner, self.context.tracer)

    async def _write_status(self, status: AttemptStatus, patience: float | None, *, is_claiming: bool) -> None:
        try:
            finishing = self._finish(status, is_claiming=is_claiming)
            await (finishing if patience is None else asyncio.wait_for(finishing, patience))
            logger.debug("Rollout %s is finished: %s.", self.rollout.rollout_id, status)
        except Exception:  # the store's own time limits will settle the attempt
            logger.exception("The status of rollout %s could not be written.", self.rollout.rollout_id)

    async def _finish(self, status: AttemptStatus, *, is_claiming: bool) -> None:
        """Write the status in one step with the last spans, the output and the next claim; if the store refuses that,
        store the spans one by one first."""
        store, context = self.context.store, self.context
        key = (self.rollout.rollout_id, self.rollout.attempt.attempt_id, status)
        try:
            options: dict[str, Any] = {"spans": self._last.spans, **self._changes()}
            if is_claiming and self.slot is not None and self.slot.claims_next:
                options |= {"worker_id": context.worker_id, "known_resources": context.known_resources.versions}
                self.following = await store.finish_and_claim(*key, **options)
            else:
                await store.finish_attempt(*key, **options)
        except Exception as error:  # noqa: BLE001 # the longer way may still be open
            logger.warning("Rollout %s could not be finished in one step: %s", self.rollout.rollout_id, error)
            await self._store_last_spans()
            await store.finish_attempt(*key, **self._changes())

    async def _flush_calls(self) -> None:
        """Let the proxy store the agent's calls first: whoever waits for the rollout will read them at once."""
        flushed = await flush_calls(self._proxies, self.rollout, self.rollout.attempt.attempt_id)
        self._lost_calls = flushed.lost

    def _changes(self) -> dict[str, Any]:
        """What is written with the status."""
        changes: dict[str, Any] = {}
        if self.error is None and not isinstance(self._output, Unset):
            changes["output"] = self._output
        notes = self._notes()
        if notes:
            changes["metadata"] = {**(self.rollout.attempt.metadata or {}), **notes}
        return changes

    async def _store_last_spans(self) -> None:
        """One by one, so that a span which the store refuses does not take others with it."""
        store, rollout_id, attempt_id = self.context.store, self.rollout.rollout_id, self.rollout.attempt.attempt_id
        spans, self._last.spans = self._last.spans, []
        for span in spans:
            try:
                number = await store.get_next_span_sequence_id(rollout_id, attempt_id)
                # Not add_span, which would keep a span twice that the step before has stored after all.
                await store.add_many_spans([span.model_copy(update={"sequence_id": number})])
            except Exception as error:  # noqa: BLE001 # whatever a store raises: the loss is reported on the attempt
                reason = f"the store refused it: {type(error).__name__}: {error}"
                self.context.tracer.get_last_losses().add(reason)

    def _notes(self) -> dict[str, Any]:
        """What the attempt should say besides its status."""
        notes: dict[str, Any] = {}
        if self.error is not None:
            notes["error"] = FailureNote.of(self.error).as_metadata()
        losses = self.context.tracer.get_last_losses() if self.spans else None
        if losses is not None and losses.count:
            notes["lost_spans"] = {"count": losses.count, "reasons": dict(losses.reasons)}
        if self._lost_calls:
            notes["lost_calls"] = {"count": sum(self._lost_calls.values()), "reasons": self._lost_calls}
        return notes


def _settle(is_over: "asyncio.Future[None]") -> None:
    if not is_over.done():
        is_over.set_result(None)


async def _end(work: "asyncio.Future[Any]") -> None:
    """Cancel the agent; one that does not end is left behind."""
    work.cancel()
    _, pending = await asyncio.wait([work], timeout=CANCEL_SECONDS)
    if pending:
        logger.warning("An agent did not end within %g s of being cancelled and is left behind.", CANCEL_SECONDS)


def _last_trace(tracer: Tracer) -> Sequence[Any]:
    try:
        return tracer.get_last_trace()
    except (RuntimeError, NotImplementedError):  # it has recorded nothing, or keeps no traces
        return []
