"""Evidence: what the store knows of a run, read into plain data that rules can judge.

Of a long run the metrics of every step are read, and the newest rollouts only: what is wrong at the end of a run is
still to be seen there.
"""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from agentlightning.adapter import TraceToTrajectory
from agentlightning.adapter.trajectory import DropReason
from agentlightning.algorithm.batches import READS_AT_ONCE
from agentlightning.events.advice import rewards_by_agent
from agentlightning.semconv import CALL_SPAN, PROXY
from agentlightning.store.base import LightningStore
from agentlightning.store.selection import failure_text, run_id_of
from agentlightning.types import AttemptedRollout, MetricPoint, Rollout, Run, Span
from agentlightning.types.rewards import final_reward_of

NEWEST_ROLLOUTS: Final = 256
"""How many rollouts of a run are read with their spans."""
PAGE_ROLLOUTS: Final = 500
_TRAINER: Final = "trainer_run_id"
NEWEST_RUNS: Final = 20
"""Of each prompt optimiser, among which the one is looked for that it keeps beside the trainer's."""
_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*")
"""Up to the line with the error itself."""
_NO_IDS: Final = (DropReason.NO_PROMPT_IDS, DropReason.NO_RESPONSE_IDS, DropReason.UNREADABLE_IDS, DropReason.EXCLUDED)
_FINISHED: Final = ("succeeded", "failed")
_KINDS: Final[Mapping[str, "Kind"]] = {
    **dict.fromkeys(("EvaluationRun", "Baseline", "DryRun"), "trial"),
    **dict.fromkeys(("APO", "GEPA", "apo", "gepa"), "prompts"),
    "SFT": "examples",
}
Kind = Literal["groups", "examples", "prompts", "trial"]
"""What a run learns from: rewards compared in groups, as GRPO and most algorithms do, or good examples; or it improves
prompts, or learns nothing at all."""


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
    is_sample: bool = False
    """Whether the run has more rollouts than were read."""
    optimisation: Mapping[str, Any] = field(default_factory=dict)
    """What a prompt optimiser wrote down; empty for other runs."""
    policy: str = ""
    """The one of several policies whose metrics `series` gives."""

    def series(self, name: str) -> list[float]:
        """A metric by step, without the steps that do not have it; of the policy, where it has one of its own."""
        own = f"{self.policy}/{name}"
        found = [point.values.get(own, point.values.get(name)) for point in self.points]
        return [value for value in found if value is not None and math.isfinite(value)]

    def setting(self, path: str) -> Any:
        """An argument of the algorithm, such as `learning.learning_rate`; None where it is not known, or None."""
        value: Any = self.run.config.get("settings", {}).get("algorithm")
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def policies(self) -> list[str]:
        """Names of the policies that have metrics of their own; one without a name if there is but one policy."""
        names = {name for point in self.points for name in point.values}
        return sorted(name.removesuffix("/samples/used") for name in names if name.endswith("/samples/used")) or [""]

    @property
    def kind(self) -> "Kind":
        algorithm = str(self.run.config.get("algorithm")).rpartition(".")[2]
        return "prompts" if self.optimisation else _KINDS.get(algorithm, "groups")

    @property
    def error(self) -> str | None:
        """With what the run failed, in one line; None if it did not."""
        if self.run.status == "lost":
            return "Its process ended without notice"
        text = _TRACEBACK.sub("", str(self.run.summary.get("error") or "")) if self.run.status == "failed" else ""
        return " ".join(text.partition("\n\n")[0].split())[:500] or None

    @property
    def sample_words(self) -> str:
        """Says of a count of rollouts that it is not of all."""
        return " (a sample, the newest)" if self.is_sample else ""

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
        """Whether a model was to learn from token ids."""
        is_known = str(self.run.config.get("algorithm")).endswith((".GRPO", ".SFT"))
        return is_known or any(name.endswith("samples/used") for point in self.points for name in point.values)

    @property
    def steps_learned(self) -> int:
        """Steps that changed the model, or one of several."""
        metric = f"{self.policy}/learner/loss" if self.policy else "learner/loss"
        return sum(any(name.endswith((metric, "sft/loss")) for name in point.values) for point in self.points)


async def read_evidence(store: LightningStore, run: Run) -> Evidence:
    """What the store knows of a run."""
    points = list(await store.query_metrics(run.run_id))
    found: list[AttemptedRollout | Rollout] = []
    waiting = 0
    async for one in rollouts_of(store, run):
        if one.status in _FINISHED:
            found.append(one)
        waiting += one.status not in (*_FINISHED, "cancelled")
        if len(found) > NEWEST_ROLLOUTS:
            break
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def read(one: AttemptedRollout | Rollout) -> RolloutEvidence:
        async with gate:
            return await read_rollout(store, one)

    rollouts = await asyncio.gather(*map(read, found[:NEWEST_ROLLOUTS]))
    return Evidence(run, points, rollouts, waiting, len(found) > NEWEST_ROLLOUTS, await _optimisation_of(store, run))


async def _optimisation_of(store: LightningStore, run: Run) -> Mapping[str, Any]:
    """The summary of a prompt optimiser's own run, which is this one, or began in it or has gone on in it."""
    newest_first: dict[str, Any] = {"sort_by": "start_time", "sort_order": "desc", "limit": NEWEST_RUNS}
    newest = [one for name in ("apo", "gepa") for one in await store.query_runs(name=name, **newest_first)]
    own = [one for one in newest if run.run_id in (one.metadata.get(_TRAINER), one.summary.get(_TRAINER))]
    return next((one.summary for one in (run, *own) if "candidates" in one.summary), {})


async def rollouts_of(store: LightningStore, run: Run) -> AsyncIterator[AttemptedRollout | Rollout]:
    """The rollouts of a run, newest first: those that name it or, if none does, those of its time that name no run."""
    names = [run.run_id, *filter(None, [run.metadata.get(_TRAINER), run.summary.get(_TRAINER)])]
    is_named = (await store.query_rollouts(run_id_in=names, limit=0)).total > 0
    of_its_time = {"start_time_min": run.start_time, "start_time_max": run.end_time}
    own: dict[str, Any] = {"run_id_in": names} if is_named else of_its_time
    offset = 0
    while True:
        page = await store.query_rollouts(
            **own, sort_by="start_time", sort_order="desc", limit=PAGE_ROLLOUTS, offset=offset
        )
        for one in page:
            if is_named or run_id_of(one) is None:
                yield one
        offset += len(page)
        if len(page) < PAGE_ROLLOUTS:
            return


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
        f"{span.attributes.get(f'{PROXY}.http_status') or 'no answer'}: {span.status.description or 'no reason given'}"
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
