"""Evidence: what the store knows of a run, read into plain data that rules can judge.

Of a long run the metrics of every step are read, and the newest rollouts only: what is wrong at the end of a run is
still to be seen there.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.adapter import TraceToTrajectory
from agentlightning.adapter.trajectory import DropReason
from agentlightning.algorithm.batches import READS_AT_ONCE
from agentlightning.events.advice import rewards_by_agent
from agentlightning.llm_proxy.call_record import ATTRIBUTE_PREFIX, CALL_SPAN
from agentlightning.store.base import LightningStore
from agentlightning.store.rollout_index import failure_text
from agentlightning.types import AttemptedRollout, MetricPoint, Rollout, Run, Span
from agentlightning.types.rewards import final_reward_of

NEWEST_ROLLOUTS: Final = 256
"""How many rollouts of a run are read with their spans."""
PAGE_ROLLOUTS: Final = 500
_NO_IDS: Final = (DropReason.NO_PROMPT_IDS, DropReason.NO_RESPONSE_IDS, DropReason.UNREADABLE_IDS, DropReason.EXCLUDED)
_FINISHED: Final = ("succeeded", "failed")


@dataclass(frozen=True)
class RolloutEvidence:
    """What one rollout left behind."""

    rollout_id: str
    status: str
    mode: str | None
    task: str
    """The input as text; two rollouts of one task have the same."""
    group: str | None = None
    """Rollouts of one task in one step have the same."""
    step: int | None = None
    reward: float | None = None
    error: str | None = None
    """What made the last attempt fail, in one line."""
    attempt_status: str | None = None
    calls: int = 0
    calls_with_ids: int = 0
    calls_cut_off: int = 0
    calls_failed: int = 0
    call_error: str | None = None
    """What one of the failed model calls was answered."""
    answer: tuple[tuple[int, ...], ...] | None = None
    """The tokens that the model chose; None if they were not recorded."""
    rewards_by_agent: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def has_reward(self) -> bool:
        return self.reward is not None and math.isfinite(self.reward)


@dataclass(frozen=True)
class Evidence:
    """A run, its metrics by step, and its newest rollouts."""

    run: Run
    points: Sequence[MetricPoint] = ()
    rollouts: Sequence[RolloutEvidence] = ()
    waiting: int = 0
    """Rollouts of the run that are not finished."""

    def series(self, name: str) -> list[float]:
        """A metric by step, without the steps that do not have it."""
        found = (point.values.get(name) for point in self.points)
        return [value for value in found if value is not None and math.isfinite(value)]

    @property
    def training(self) -> list[RolloutEvidence]:
        """Rollouts that were learned from, or might have been."""
        return [one for one in self.rollouts if one.mode != "val"]

    @property
    def groups(self) -> list[list[RolloutEvidence]]:
        """Training rollouts with a reward, by group; groups of one are left out."""
        by_group: defaultdict[str, list[RolloutEvidence]] = defaultdict(list)
        for one in self.training:
            if one.group is not None and one.has_reward:
                by_group[f"{one.step}/{one.group}"].append(one)
        return [group for group in by_group.values() if len(group) > 1]

    @property
    def is_training(self) -> bool:
        """Whether a model was to learn from token ids, or a reward was to rise."""
        return bool(self.series("samples/used")) or "TrainingError" in str(self.run.summary.get("error", ""))

    @property
    def steps_learned(self) -> int:
        return len(self.series("learner/loss"))


async def read_evidence(store: LightningStore, run: Run) -> Evidence:
    """What the store knows of a run."""
    points = list(await store.query_metrics(run.run_id))
    found: list[AttemptedRollout | Rollout] = []
    waiting = offset = 0
    while len(found) < NEWEST_ROLLOUTS:
        page = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=PAGE_ROLLOUTS, offset=offset)
        own = [one for one in page if _is_of(one, run)]
        found += [one for one in own if one.status in _FINISHED]
        waiting += sum(one.status not in (*_FINISHED, "cancelled") for one in own)
        offset += len(page)
        if len(page) < PAGE_ROLLOUTS or page[-1].start_time < run.start_time:
            break
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def read(one: AttemptedRollout | Rollout) -> RolloutEvidence:
        async with gate:
            return await read_rollout(store, one)

    return Evidence(run, points, await asyncio.gather(*map(read, found[:NEWEST_ROLLOUTS])), waiting)


def _is_of(rollout: Rollout, run: Run) -> bool:
    """Rollouts that name no run are told apart by their time."""
    named = (rollout.metadata or {}).get("run_id")
    if named is not None:
        return named in (run.run_id, run.metadata.get("trainer_run_id"))
    end = math.inf if run.end_time is None else run.end_time
    return run.start_time <= rollout.start_time <= end


async def read_rollout(store: LightningStore, rollout: AttemptedRollout | Rollout) -> RolloutEvidence:
    """What one rollout and its last attempt left behind."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    metadata = rollout.metadata or {}
    spans = list(await store.query_spans(rollout.rollout_id, "latest"))
    step = metadata.get("step")
    return RolloutEvidence(
        rollout_id=rollout.rollout_id,
        status=rollout.status,
        mode=rollout.mode,
        task=str(rollout.input),
        group=None if metadata.get("group") is None else str(metadata["group"]),
        step=step if isinstance(step, int) else None,
        reward=final_reward_of(spans) if spans else None,
        error=None if rollout.status == "succeeded" else failure_text(attempt),
        attempt_status=None if attempt is None else attempt.status,
        rewards_by_agent=rewards_by_agent(spans),
        **_calls_of(spans),
    )


def _calls_of(spans: Sequence[Span]) -> dict[str, Any]:
    """The model calls of one attempt, by the names of the evidence."""
    errors = [
        f"{span.attributes.get(f'{ATTRIBUTE_PREFIX}.http_status') or 'no answer'}: "
        f"{span.status.description or 'no reason given'}"
        for span in spans
        if span.name == CALL_SPAN and span.status.status_code == "ERROR"
    ]
    found: dict[str, Any] = {"calls_failed": len(errors), "call_error": errors[0] if errors else None}
    try:
        trajectory = TraceToTrajectory().adapt(spans)
    except ValueError:  # a trace that is empty, or that no tree can be made of, has no calls to count
        return found
    sampled = [(sequence, call) for sequence in trajectory.sequences for call in sequence.calls]
    return {
        **found,
        "calls": len(sampled) + sum(call.reason in _NO_IDS for call in trajectory.dropped),
        "calls_with_ids": len(sampled),
        "calls_cut_off": sum(call.is_truncated for _, call in sampled),
        "answer": tuple(sequence.token_ids[call.start : call.end] for sequence, call in sampled) or None,
    }
