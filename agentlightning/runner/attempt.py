"""One attempt, from its claim to its status: resources, hooks, the trace, the agent, its result.

What the agent raises is recorded on the attempt; what we get wrong is raised. Whatever happens, the attempt gets a
status: an attempt that nobody answers for would keep its rollout waiting.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentlightning.emitter import emit_exception
from agentlightning.errors import AttemptTimedOut, NoActiveTracer, RolloutFailed, StoreError, WorkerLost
from agentlightning.litagent.invocation import call_agent, call_callback, with_claimed_keys
from agentlightning.litagent.litagent import working_for
from agentlightning.llm_proxy.flush import are_recorded, flush_calls
from agentlightning.runner.failures import FailureNote
from agentlightning.runner.results import hint_at_output, holds_spans, record_result, store_returned_spans
from agentlightning.runner.slots import Slot
from agentlightning.store.base import UNSET, Unset
from agentlightning.store.claims import Claim, ResourcesVersion
from agentlightning.store.copies import detached
from agentlightning.tracer import Tracer
from agentlightning.tracer.recording import LastSpans, RecordingTracer
from agentlightning.types import AttemptedRollout, AttemptStatus, NamedResources, ProxyLLM, RolloutRawResult, Task
from agentlightning.types.core import TASK_ROW
from agentlightning.utils.log_failures import log_failures

if TYPE_CHECKING:
    from agentlightning.runner.agent import LitAgentRunner

logger = logging.getLogger(__name__)

LEAVING_SECONDS: Final = 5.0
"""How long the store may take to answer a runner that was cancelled: the store may be gone, and the runner leaves."""
CANCEL_SECONDS: Final = 5.0
"""How long an agent that was cancelled may take to end before it is left behind."""
MOST_KNOWN_RESOURCES: Final = 8
_TASK_ROWS: Final = "for task.%s, make the rows of the data set agl.Task(rollout_id=..., input=...)"


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
        return detached(kept)


@dataclass
class AttemptRun:
    """One attempt that is being run."""

    runner: "LitAgentRunner[Any]"
    rollout: AttemptedRollout
    resources: NamedResources | None = None
    """As they came with the claim; None if the store must be asked."""
    claim: Claim | None = None
    """By which the runner got the attempt, with its credentials; None for an attempt beside the queue."""
    slot: Slot | None = None
    """Where it runs; None for an attempt beside the queue."""
    error: BaseException | None = None
    """What made it fail."""
    spans: Sequence[Any] = ()
    _output: Any | Unset = UNSET
    """What the rollout is to keep of the agent's result; UNSET leaves what it has."""
    _last: LastSpans | None = None
    """Spans that are stored with the status."""
    _has_begun: bool = False
    """Whether the agent and the hooks were told that it begins."""
    _proxies: Sequence[ProxyLLM] = ()
    """Through which the agent's model calls may have gone."""
    _lost_calls: dict[str, int] | None = None
    _next_claim: Claim | None = None
    """What was claimed in the step that finished this attempt."""
    _is_revoked: bool = False
    _is_over: "asyncio.Future[None] | None" = None
    """Done when the agent has ended, or is to be cancelled."""

    def revoke(self) -> None:
        """Cancel the agent and write nothing more: the store has given the attempt up."""
        self._is_revoked = True
        if self._is_over is not None:
            _settle(self._is_over)

    async def run(self) -> Claim | None:
        """Run the agent, write the attempt's status and claim the next rollout; what made it fail is in `error`."""
        runner, rollout = self.runner, self.rollout
        attempt_id = rollout.attempt.attempt_id
        runner.attempts[attempt_id] = self
        status: AttemptStatus = "succeeded"
        try:
            with working_for(runner, self.claim, runner.threads):
                try:
                    await self._run()
                except asyncio.CancelledError:  # the runner leaves: it is not the agent's fault
                    status = "unresponsive"
                    self.error = WorkerLost("The runner was stopped while the agent was running.")
                    raise
                except KeyboardInterrupt as error:
                    status, self.error = "failed", error
                    raise
                except BaseException as error:  # noqa: BLE001 # a failed rollout is data: it is recorded on the attempt
                    status, self.error = "timeout" if isinstance(error, AttemptTimedOut) else "failed", error
                    if not self._is_revoked and not await self._is_cancelled():
                        runner.failures.add(rollout.rollout_id, error)
                finally:
                    try:
                        await self._end(status)
                    finally:
                        await self._write_status(status)
        finally:
            runner.attempts.pop(attempt_id, None)
        return self._next_claim

    async def _is_cancelled(self) -> bool:
        """Whether the rollout was: the models that its agent calls may be gone then, and nobody must act."""
        with contextlib.suppress(StoreError, OSError):
            rollout = await self.runner.get_store().get_rollout_by_id(self.rollout.rollout_id)
            if rollout is not None and rollout.status == "cancelled":
                self._proxies = ()  # nobody reads what they have stored
                return True
        return False

    async def _run(self) -> None:
        runner, rollout = self.runner, self.rollout
        found = self.resources if self.resources is not None else await self._stored_resources()
        resources = runner.templates.apply(with_claimed_keys(found))
        self._proxies = [resource for resource in resources.values() if isinstance(resource, ProxyLLM)]
        self._has_begun = True
        await self._call_agent_callback("on_rollout_start")
        await self._call_hooks("on_rollout_start")
        target: Any = {"store": runner.get_store(), "rollout_id": rollout.rollout_id}
        target["attempt_id"] = rollout.attempt.attempt_id
        finishing_tracer = self._finishing_tracer()
        try:
            if finishing_tracer is not None:
                async with finishing_tracer.attempt_context(**target) as self._last:
                    result = await self._traced(resources)
            else:
                async with runner.tracer.trace_context(name=rollout.rollout_id, **target):
                    result = await self._traced(resources)
        finally:
            self.spans = last_trace(runner.tracer)
        if holds_spans(result):
            await self._store_last_spans()
            self.spans = await store_returned_spans(result, rollout, runner.get_store(), self.spans)
        if not isinstance(self._output, Unset):
            hint_at_output(result, self.spans)
        elif rollout.output is not None:
            self._output = None  # an earlier attempt's, which this success replaces

    async def _traced(self, resources: NamedResources) -> RolloutRawResult:
        """What the agent returned; rewards, or what it raised, are recorded in the trace."""
        tracer = self.runner.tracer
        await self._call_hooks("on_trace_start", tracer=tracer)
        logger.debug("Rollout %s: the agent starts with %s.", self.rollout.rollout_id, list(resources) or "nothing")
        try:
            result = await self._call_agent(resources)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            with contextlib.suppress(NoActiveTracer):
                emit_exception(error)
            raise
        finally:
            await self._call_hooks("on_trace_end", tracer=tracer)
        self._output = await record_result(result, self.rollout, self.runner.get_store())
        return result

    def _finishing_tracer(self) -> RecordingTracer | None:
        """The tracer, if its last spans may be stored with the status: nobody reads the store in between."""
        runner = self.runner
        tracer = runner.tracer
        is_read = bool(runner.hooks) or runner.get_agent().has_callback("on_rollout_end")
        is_ours = getattr(type(tracer), "trace_context", None) is RecordingTracer.trace_context
        return tracer if isinstance(tracer, RecordingTracer) and is_ours and not is_read else None

    async def _stored_resources(self) -> NamedResources:
        """The resources that the rollout names or, if it names none, the latest; empty if there are none."""
        resources_id, store = self.rollout.resources_id, self.runner.get_store()
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
        self._is_over = is_over = loop.create_future()  # `asyncio.wait` would take longer than all else here
        work = loop.create_task(self._work(resources, is_over))
        work.add_done_callback(lambda _: _settle(is_over))  # for one that is cancelled before it begins
        if self._is_revoked:
            _settle(is_over)
        timer = None if limit is None else loop.call_later(limit, _settle, is_over)
        try:
            await is_over
        except asyncio.CancelledError:
            await _cancel_agent(work)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not work.done():
            await _cancel_agent(work)
            if self._is_revoked:
                raise WorkerLost("The store has given up the attempt, so its agent was cancelled.")
            raise AttemptTimedOut(f"The agent did not finish within {limit:g} s.")
        if work.cancelled():
            raise RolloutFailed("The agent was cancelled from within: something it awaited raised CancelledError.")
        return work.result()

    async def _work(self, resources: NamedResources, is_over: "asyncio.Future[None]") -> RolloutRawResult:
        rollout, runner = self.rollout, self.runner
        # A rollout that was enqueued as a `Task` reaches the agent as one.
        is_task = type(rollout.input) is Task or isinstance((rollout.metadata or {}).get(TASK_ROW), dict)
        task = Task.of_rollout(rollout) if is_task else rollout.input
        try:
            return await call_agent(
                runner.method_for(rollout.mode),
                task=task,
                resources=resources,
                rollout=rollout,
                threads=runner.threads,
            )
        except AttributeError as error:
            if error.obj is task and error.name in Task.model_fields:
                error.args = (f"{error}; a row reaches the agent as it is: {_TASK_ROWS % error.name}.",)
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            # Out of a task these would end the event loop, and with it every other rollout.
            raise RolloutFailed(f"The agent raised {type(error).__name__}: {error}") from error
        finally:
            _settle(is_over)  # a round of the loop earlier than when the task is done

    async def _call_hooks(self, name: str, **arguments: object) -> None:
        runner = self.runner
        for hook in runner.hooks:
            with log_failures(logger, "Hook %s.%s failed.", type(hook).__name__, name, exits=True):
                callback = getattr(hook, name)
                await callback(agent=runner.get_agent(), runner=runner, rollout=self.rollout, **arguments)

    async def _call_agent_callback(self, name: str, *outcome: object) -> None:
        """Call the agent's own callback, if it has one."""
        runner = self.runner
        agent = runner.get_agent()
        if agent.has_callback(name):
            task = Task.of_rollout(self.rollout)
            await call_callback(agent, name, task, *outcome, runner, runner.tracer)

    # ------------------------------------------------------------------ the end

    async def _end(self, status: AttemptStatus) -> None:
        """What happens before the status is written."""
        if self._proxies and not (status == "unresponsive" or self._is_revoked or are_recorded(self.spans)):
            # The proxy stores the agent's calls first: whoever waits for the rollout will read them at once.
            flushed = await flush_calls(self._proxies, self.rollout, self.rollout.attempt.attempt_id)
            self._lost_calls = flushed.lost
        if self._has_begun:
            await self._call_agent_callback("on_rollout_end", self.rollout)
            await self._call_hooks("on_rollout_end", spans=self.spans)

    async def _write_status(self, status: AttemptStatus) -> None:
        if self._is_revoked:
            logger.info("Rollout %s: the attempt is no longer ours, so its agent was ended.", self.rollout.rollout_id)
            return
        # Where that fails, the store's own time limits will settle the attempt.
        with log_failures(logger, "The status of rollout %s could not be written.", self.rollout.rollout_id):
            # The store may be gone too when the runner leaves.
            finishing = self._finish(status)
            await (asyncio.wait_for(finishing, LEAVING_SECONDS) if status == "unresponsive" else finishing)
            logger.debug("Rollout %s is finished: %s.", self.rollout.rollout_id, status)

    async def _finish(self, status: AttemptStatus) -> None:
        """Write the status in one step with the last spans, the output and the next claim; if the store refuses that,
        store the spans one by one first."""
        store, slot = self.runner.get_store(), self.slot
        key = (self.rollout.rollout_id, self.rollout.attempt.attempt_id, status)
        is_leaving = status == "unresponsive" or isinstance(self.error, KeyboardInterrupt)
        try:
            options: dict[str, Any] = {"spans": [] if self._last is None else self._last.spans, **self._changes()}
            if slot is not None and not is_leaving and slot.queue.reserve_next():
                options |= self.runner.claim_options()
                self._next_claim = await slot.claim_one(
                    lambda claim_id: store.finish_and_claim(*key, **options, claim_id=claim_id)
                )
            else:
                await store.finish_attempt(*key, **options)
        except Exception as error:  # noqa: BLE001 # the longer way may still be open
            logger.warning("Rollout %s could not be finished in one step: %s", self.rollout.rollout_id, error)
            await self._store_last_spans()
            await store.finish_attempt(*key, **self._changes())

    def _changes(self) -> dict[str, Any]:
        """What is written with the status: the output, and what the attempt should say besides."""
        changes: dict[str, object] = {}
        notes: dict[str, object] = {}
        if self.error is not None:
            notes["error"] = FailureNote.of(self.error).as_metadata()
        elif not isinstance(self._output, Unset):
            changes["output"] = self._output
        losses = self.runner.tracer.get_last_losses() if self.spans else None
        if losses is not None and losses.count:
            notes["lost_spans"] = {"count": losses.count, "reasons": dict(losses.reasons)}
        if self._lost_calls:
            notes["lost_calls"] = {"count": sum(self._lost_calls.values()), "reasons": self._lost_calls}
        if notes:
            changes["metadata"] = {**(self.rollout.attempt.metadata or {}), **notes}
        return changes

    async def _store_last_spans(self) -> None:
        """One by one, so that a span which the store refuses does not take others with it."""
        store, rollout_id, attempt_id = (
            self.runner.get_store(),
            self.rollout.rollout_id,
            self.rollout.attempt.attempt_id,
        )
        last, self._last = self._last, None
        for span in () if last is None else last.spans:
            try:
                number = await store.get_next_span_sequence_id(rollout_id, attempt_id)
                # Not add_span, which would keep a span twice that the step before has stored after all.
                await store.add_many_spans([span.model_copy(update={"sequence_id": number})])
            except Exception as error:  # noqa: BLE001 # whatever a store raises: the loss is reported on the attempt
                reason = f"the store refused it: {type(error).__name__}: {error}"
                self.runner.tracer.get_last_losses().add(reason)


def _settle(is_over: "asyncio.Future[None]") -> None:
    if not is_over.done():
        is_over.set_result(None)


async def _cancel_agent(work: "asyncio.Future[Any]") -> None:
    """Cancel the agent; one that does not end is left behind."""
    work.cancel()
    _, pending = await asyncio.wait([work], timeout=CANCEL_SECONDS)
    if pending:
        logger.warning("An agent did not end within %g s of being cancelled and is left behind.", CANCEL_SECONDS)


def last_trace(tracer: Tracer) -> Sequence[Any]:
    """The spans of the last trace; none of a tracer that keeps none."""
    try:
        return tracer.get_last_trace()
    except (RuntimeError, NotImplementedError):  # it has recorded nothing, or keeps no traces
        return []
