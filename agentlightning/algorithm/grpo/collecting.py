"""Rollouts for a step: sent in groups, waited for, and read as trajectories.

All through the store: whoever runs the agents is none of an algorithm's business.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.adapter import TraceToTrajectory
from agentlightning.adapter.calls import response_id_of
from agentlightning.adapter.trajectory import DroppedCall, DropReason, Trajectory
from agentlightning.algorithm.grpo.advantages import is_finite
from agentlightning.algorithm.grpo.samples import RolloutOutcome
from agentlightning.errors import StoreError, TrainingError
from agentlightning.llm_proxy.spans import CALL_SPAN, RAW_SPAN
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig, RolloutMode, RolloutStatus, Span
from agentlightning.types.rewards import final_reward_of

__all__ = ["Collector", "FinishedRollout", "Sent", "check_token_ids", "outcomes_of", "spans_of_model"]

logger = logging.getLogger(__name__)

AT_ONCE: Final = 32
"""Rollouts that are read from the store at the same time."""
_READ_AT_ONCE: Final = 8
_UNFINISHED: Final[tuple[RolloutStatus, ...]] = ("queuing", "requeuing", "preparing", "running")
_REQUESTED_MODEL: Final = ("agentlightning.proxy.requested_model", "gen_ai.request.model")
"""What a call says of the model it asked for: the proxy's word first, for a backend may know it by another name."""

_WITHOUT_IDS: Final = (
    *(DropReason.NO_PROMPT_IDS, DropReason.NO_RESPONSE_IDS),
    *(DropReason.UNREADABLE_IDS, DropReason.EXCLUDED),
)
_SOURCES_NAMED: Final = 3
"""Sources of calls without token ids that an error names."""


@dataclass
class Sent:
    """Rollouts under way: the groups they belong to, by id."""

    group_of: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that is over, and what it left."""

    rollout: Rollout
    group: str
    spans: list[Span]
    reward: float | None
    error: str | None = None

    @property
    def has_succeeded(self) -> bool:
        return self.rollout.status == "succeeded"

    @property
    def own_reward(self) -> float | None:
        """The reward, if the rollout succeeded and it is a finite number; None if the rollout counts as failed."""
        is_usable = self.has_succeeded and self.reward is not None and is_finite(self.reward)
        return self.reward if is_usable else None

    @property
    def failure(self) -> str:
        """Why it counts as failed, in one line."""
        without = "without a reward" if self.reward is None else f"with the reward {self.reward:g}"
        return self.error or f"{self.rollout.status}, {without}"


class Collector:
    """Sends tasks and waits for what becomes of them."""

    def __init__(self, store: LightningStore, config: RolloutConfig | None = None) -> None:
        self._store = store
        self._config = config or RolloutConfig()
        self._numbers = itertools.count()

    async def send(
        self,
        tasks: Sequence[Any],
        *,
        copies: int = 1,
        mode: RolloutMode = "train",
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Sent:
        """Enqueue each task so many times, as a group."""
        groups = [f"group-{next(self._numbers)}" for _ in tasks]
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode=mode,
                resources_id=resources_id,
                config=self._config,
                metadata={**(metadata or {}), "group": group},
            )
            for task, group in zip(tasks, groups, strict=True)
            for _ in range(copies)
        ]
        rollouts = await self._store.enqueue_many_rollouts(requests)
        owners = [group for group in groups for _ in range(copies)]
        return Sent({rollout.rollout_id: group for rollout, group in zip(rollouts, owners, strict=True)})

    async def finished(self, sent: Sent) -> list[FinishedRollout]:
        """Wait for rollouts and read their spans, in the order in which they were sent."""
        rollouts = await self._store.wait_for_rollouts(rollout_ids=list(sent.group_of))
        gate = asyncio.Semaphore(AT_ONCE)

        async def read(rollout: Rollout) -> FinishedRollout:
            spans, error = [], _error_of(rollout)
            async with gate:
                try:
                    spans = list(await self._store.query_spans(rollout.rollout_id, "latest"))
                except StoreError as unread:  # its spans may have been dropped to save memory
                    error = f"{type(unread).__name__}: {unread}"
            reward = final_reward_of(spans) if spans else None
            return FinishedRollout(rollout, sent.group_of[rollout.rollout_id], spans, reward, error)

        return list(await asyncio.gather(*map(read, rollouts)))

    async def withdraw(self, rollout_ids: Iterable[str]) -> None:
        """Cancel those that are not over: nobody waits for them any more."""
        wanted = list(rollout_ids)
        if wanted:
            await self._cancel(rollout_id_in=wanted)

    async def withdraw_all(self, resources_ids: Iterable[str]) -> list[Rollout]:
        """Cancel what a run that was killed left in the queue, by the resources that are its own; what that was."""
        return await self._cancel(resources_ids=set(resources_ids))  # no store can be asked for resources

    async def _cancel(
        self, *, rollout_id_in: list[str] | None = None, resources_ids: AbstractSet[str] | None = None
    ) -> list[Rollout]:
        try:
            pending = await self._store.query_rollouts(status_in=_UNFINISHED, rollout_id_in=rollout_id_in)
            left = [one for one in pending if resources_ids is None or one.resources_id in resources_ids]
            await asyncio.gather(*(self._store.update_rollout(one.rollout_id, status="cancelled") for one in left))
        except StoreError as error:  # they are of no use, and of no harm but the work they make
            logger.warning("Rollouts that are not needed any more could not be cancelled: %s", error)
            return []
        return left


async def outcomes_of(
    finished: Sequence[FinishedRollout],
    adapter: TraceToTrajectory,
    *,
    model: str | None = None,
    with_failed: bool = False,
) -> list[RolloutOutcome]:
    """What rollouts give to learn from.

    Args:
        model: Of a trace with calls of several models, the one to look at.
        with_failed: Read the traces of rollouts that failed too.
    """
    outcomes: list[RolloutOutcome] = []
    for number, one in enumerate(finished):
        if number % _READ_AT_ONCE == 0:
            await asyncio.sleep(0)  # others use this loop too
        spans = one.spans if model is None else spans_of_model(one.spans, model)
        trajectory: Trajectory | None = None
        error = one.error
        if spans and (one.has_succeeded or with_failed):
            try:
                trajectory = adapter.adapt(spans)
            except ValueError as unreadable:
                error = str(unreadable)
        outcomes.append(
            RolloutOutcome(
                rollout_id=one.rollout.rollout_id,
                group=one.group,
                status=one.rollout.status,
                reward=one.reward,
                trajectory=trajectory,
                error=error,
            )
        )
    return outcomes


def check_token_ids(finished: Sequence[FinishedRollout], outcomes: Sequence[RolloutOutcome]) -> None:
    """Raise TrainingError if model calls were recorded and none of them brought token ids; its message says whose."""
    trajectories = [outcome.trajectory for outcome in outcomes if outcome.trajectory is not None]
    dropped = {(one.rollout_id, call.span_id) for one in trajectories for call in one.dropped if _lacks_ids(call)}
    if not dropped or any(one.sequences for one in trajectories):
        return
    spans = [span for one in finished for span in one.spans]
    proxied = {response_id_of(span.attributes): span for span in spans if span.name == CALL_SPAN}
    calls = [span for span in spans if (span.rollout_id, span.span_id) in dropped]
    sources = Counter(_source_of(proxied.get(response_id_of(call.attributes) or "", call)) for call in calls)
    told = "; ".join(f"{count} {source}" for source, count in sources.most_common(_SOURCES_NAMED))
    raise TrainingError(
        f"None of the {len(dropped)} model calls brought the token ids that training needs ({told}); serve the model "
        "with a backend that returns them, such as 'hosted_vllm/...' or 'agl/...' in the proxy's model list, call it "
        "with chat completions, and keep it out of redirect_exclude."
    )


def _lacks_ids(call: DroppedCall) -> bool:
    return call.reason in _WITHOUT_IDS


def _source_of(span: Span) -> str:
    """The kind of a call and who answered it, as the proxy recorded it or else as the agent's tracer did."""
    attributes = span.attributes
    if span.name == CALL_SPAN:
        dialect, backend = (
            attributes.get("agentlightning.proxy.dialect"),
            attributes.get("agentlightning.proxy.backend"),
        )
        return f"in the {dialect} dialect by backend '{backend}'"
    return f"'{span.name}' by '{attributes.get('server.address', 'an unknown server')}'"


def _error_of(rollout: Rollout) -> str | None:
    """Why the last attempt failed, in one line."""
    attempt = getattr(rollout, "attempt", None)
    told = ((attempt.metadata or {}).get("error") or {}) if attempt is not None else {}
    first_line, _, _ = str(told.get("message") or "").partition("\n")
    return f"{told['type']}: {first_line}" if told.get("type") else None


def spans_of_model(spans: Iterable[Span], model: str) -> list[Span]:
    """A trace without the calls of other models."""
    kept: list[Span] = []
    left_out: set[str] = set()
    for span in sorted(spans, key=lambda span: span.name == RAW_SPAN):  # those after the calls they belong to
        asked = next((span.attributes[name] for name in _REQUESTED_MODEL if name in span.attributes), None)
        if (asked is not None and asked != model) or (span.name == RAW_SPAN and span.parent_id in left_out):
            left_out.add(span.span_id)
        else:
            kept.append(span)
    return kept
