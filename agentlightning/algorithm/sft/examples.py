"""Rollouts become examples to imitate: which are looked at, accepted and held out, and how often they are gone through.

Whatever is left out is counted with its reason. Rollouts of the same task are a group; a group is learned from or held
out as a whole, so that the loss on what is held out tells of tasks that were not seen.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import orjson

from agentlightning.adapter.sequences import TokenSequence
from agentlightning.algorithm.batches import FinishedRollout, Sent, TrainingUse
from agentlightning.algorithm.grpo.samples import Sample
from agentlightning.algorithm.utils import check_least
from agentlightning.errors import ConfigurationError, NotFound
from agentlightning.store.base import LightningStore
from agentlightning.types import Rollout, RolloutMode
from agentlightning.utils.json_values import JsonMapping
from agentlightning.utils.spelling import suggests_arguments


@suggests_arguments
@dataclass(frozen=True, kw_only=True)
class FittingSettings:
    """How often and in which portions examples are gone through."""

    epochs: int = 3
    batch_size: int = 32
    """Sequences of one step of the optimiser."""
    patience: int | None = None
    """End after so many epochs in a row without a lower held-out loss; None makes all epochs."""
    seed: int | None = None
    """Of the order of examples; None takes that of the algorithm."""

    def __post_init__(self) -> None:
        check_least(self, epochs=1, batch_size=1, patience=1)

    def planned(self, seed: int) -> "FittingSettings":
        """The same with the seed of the whole training, where none is set."""
        return self if self.seed is not None else replace(self, seed=seed)


@dataclass(frozen=True, kw_only=True)
class RecordedRollouts:
    """Which rollouts of a store are looked at; of these, those that succeeded."""

    run_id: str | None = None
    """Those that began while this run was open; None takes those of all runs."""
    rollout_ids: Sequence[str] | None = None
    """These; None takes all."""
    modes: Sequence[RolloutMode | None] = ("train", None)
    """By default not those of validation and test."""
    metadata: JsonMapping = field(default_factory=dict)
    """Those whose metadata has these entries."""
    model: str | None = None
    """Of traces with calls of several models, the one whose calls are learned."""

    def has(self, rollout: Rollout) -> bool:
        """Whether its mode and metadata are wanted."""
        own = rollout.metadata or {}
        return rollout.mode in self.modes and all(
            name in own and own[name] == value for name, value in self.metadata.items()
        )


async def find(store: LightningStore, wanted: RecordedRollouts) -> Sent:
    """The rollouts that are wanted, grouped by their tasks, in the order in which they are named or were made.

    NotFound if the run, or one that is named, is not there.
    """
    found = list(await store.query_rollouts(status_in=["succeeded"], rollout_id_in=wanted.rollout_ids))
    missing = set(wanted.rollout_ids or ()) - {rollout.rollout_id for rollout in found}
    if missing:
        raise NotFound(f"{len(missing)} of the rollouts are not in the store as succeeded, such as '{min(missing)}'.")
    began, ended = -math.inf, math.inf
    if wanted.run_id is not None:
        run = await store.get_run_by_id(wanted.run_id)
        if run is None:
            raise NotFound(f"There is no run '{wanted.run_id}' in the store.")
        began, ended = run.start_time, math.inf if run.end_time is None else run.end_time
    kept = [rollout for rollout in found if wanted.has(rollout) and began <= rollout.start_time <= ended]
    if wanted.rollout_ids is not None:
        place = {rollout_id: number for number, rollout_id in enumerate(wanted.rollout_ids)}
        kept.sort(key=lambda rollout: place[rollout.rollout_id])
    return Sent({rollout.rollout_id: task_key(rollout.input) for rollout in kept})


def task_key(task: object) -> str:
    """The same for equal tasks."""
    return orjson.dumps(task, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=repr).decode()


class Rejected(str, Enum):
    """Why a rollout, or one of its sequences, is not imitated."""

    FAILED = "failed"
    """A rollout that did not succeed, or whose trace cannot be read."""
    NO_TOKENS = "no_tokens"
    """A rollout without a model call whose tokens were recorded."""
    NO_REWARD = "no_reward"
    """A rollout without a reward that is a finite number, where rewards are compared."""
    LOW_REWARD = "low_reward"
    """A rollout whose reward is below the least."""
    NOT_BEST = "not_best"
    """A rollout of a task of which enough others were better."""
    TRUNCATED = "truncated"
    """A sequence with an answer that was cut off, at its end or before: to imitate it is to learn not to end."""
    TOO_LONG = "too_long"
    """A sequence of more tokens than the model takes."""
    FOREIGN_TOKENS = "foreign_tokens"
    """A sequence with tokens that the model does not know: another model's."""


@suggests_arguments
@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Rejection sampling: which rollouts are good enough to be imitated."""

    min_reward: float | None = None
    """The least; None accepts every reward, and rollouts without one."""
    keep_per_task: int | None = None
    """The best so many of each task, of equal ones the first; None keeps all."""
    skip_truncated: bool = True
    """Leave out sequences with an answer that was cut off, as far as the finish reasons of the calls tell; those that
    the server broke off are left out in any case."""

    def __post_init__(self) -> None:
        if self.keep_per_task is not None and self.keep_per_task < 1:
            raise ConfigurationError(f"keep_per_task is {self.keep_per_task}; it must be None or at least 1.")
        if self.min_reward is not None and not math.isfinite(self.min_reward):
            raise ConfigurationError(f"min_reward is {self.min_reward}; it must be None or a finite number.")

    def reason_against(self, outcome: FinishedRollout) -> Rejected | None:
        """Why one is not accepted, whatever the others are."""
        if outcome.status != "succeeded" or outcome.trajectory is None:
            return Rejected.FAILED
        if outcome.trajectory.n_sampled_tokens == 0:
            return Rejected.NO_TOKENS
        if self.min_reward is None and self.keep_per_task is None:
            return None
        if outcome.reward is None or not math.isfinite(outcome.reward):
            return Rejected.NO_REWARD
        return Rejected.LOW_REWARD if self.min_reward is not None and outcome.reward < self.min_reward else None


@dataclass(frozen=True)
class Examples:
    """What is imitated, and what is not."""

    samples: list[Sample]
    """In the order of the rollouts; the group of each is its task."""
    rollouts: int
    """Rollouts that were looked at."""
    rejected: Counter[Rejected]
    reasons: Mapping[str, Rejected] = field(default_factory=dict)
    """Why something of a rollout is not imitated, by its id."""

    def uses(self) -> dict[str, TrainingUse]:
        """What becomes of each rollout, by id."""
        left_out = {key: TrainingUse(reason.value) for key, reason in self.reasons.items()}
        return left_out | {rollout_id: TrainingUse() for rollout_id in self.rollout_ids}

    @property
    def rollout_ids(self) -> list[str]:
        return list(dict.fromkeys(sample.rollout_id for sample in self.samples))

    def metrics(self) -> dict[str, float]:
        """Numbers for the record of a run; every reason is there, also where its count is zero."""
        return {
            "examples/rollouts": float(self.rollouts),
            "examples/rollouts_used": float(len(self.rollout_ids)),
            "examples/sequences": float(len(self.samples)),
            "examples/tokens": float(sum(sum(sample.loss_mask) for sample in self.samples)),
            **{f"rejected/{reason.value}": float(self.rejected[reason]) for reason in Rejected},
        }

    def words(self) -> str:
        """One sentence: what is used, and why the rest is not."""
        reasons = [f"{count} {reason.value}" for reason, count in self.rejected.most_common() if count]
        left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
        return f"{len(self.rollout_ids)} of {self.rollouts} rollouts are used{left_out}."


def examples_of(
    outcomes: Sequence[FinishedRollout], acceptance: Acceptance, *, max_length: int, vocab_size: int
) -> Examples:
    """The sequences of the rollouts that are accepted, as samples that all count alike.

    Args:
        outcomes: Rollouts of any number of tasks.
        acceptance: Which of them are good enough.
        max_length: Tokens of the longest sequence that the model takes.
        vocab_size: Tokens that the model knows.
    """
    rejected: Counter[Rejected] = Counter()
    reasons: dict[str, Rejected] = {}

    def reject(outcome: FinishedRollout, reason: Rejected) -> None:
        rejected[reason] += 1
        reasons[outcome.rollout_id] = reason

    fitting: dict[str, list[TokenSequence]] = {}
    good: list[FinishedRollout] = []
    for outcome in outcomes:
        reason = acceptance.reason_against(outcome)
        if reason is not None:
            reject(outcome, reason)
            continue
        assert outcome.trajectory is not None
        kept: list[TokenSequence] = []
        for sequence in outcome.trajectory.sequences:
            if sequence.is_aborted or (acceptance.skip_truncated and sequence.is_truncated):
                reject(outcome, Rejected.TRUNCATED)
            elif len(sequence.token_ids) > max_length:
                reject(outcome, Rejected.TOO_LONG)
            elif not all(0 <= token < vocab_size for token in sequence.token_ids):
                reject(outcome, Rejected.FOREIGN_TOKENS)
            elif any(sequence.loss_mask[1:]):
                kept.append(sequence)
        if kept:
            good.append(outcome)
            fitting[outcome.rollout_id] = kept
    best = _best(good, acceptance.keep_per_task)
    chosen = {outcome.rollout_id for outcome in best}
    for outcome in good:
        if outcome.rollout_id not in chosen:
            reject(outcome, Rejected.NOT_BEST)
    samples = [_sample(outcome, sequence) for outcome in best for sequence in fitting[outcome.rollout_id]]
    return Examples(samples, len(outcomes), rejected, reasons)


def _best(outcomes: Sequence[FinishedRollout], per_task: int | None) -> list[FinishedRollout]:
    """In their order."""
    if per_task is None:
        return list(outcomes)
    kept: Counter[str] = Counter()
    chosen: set[str] = set()
    for outcome in sorted(outcomes, key=lambda one: -(one.reward or 0.0)):  # stable: of equal ones the first
        if kept[outcome.group] < per_task:
            kept[outcome.group] += 1
            chosen.add(outcome.rollout_id)
    return [outcome for outcome in outcomes if outcome.rollout_id in chosen]


def _sample(outcome: FinishedRollout, sequence: TokenSequence) -> Sample:
    """What came before the first token is nothing, so no model can learn to choose it."""
    return Sample(
        token_ids=list(sequence.token_ids),
        loss_mask=[0, *sequence.loss_mask[1:]],
        logprobs=[None] * len(sequence.token_ids),
        advantage=1.0,
        version=None,
        group=outcome.group,
        rollout_id=outcome.rollout_id,
    )


@dataclass(frozen=True)
class Split:
    """Samples to learn from, and samples to be judged by."""

    train: list[Sample]
    held_out: list[Sample]


def split(samples: Sequence[Sample], share: float, seed: int) -> Split:
    """Hold out that share of the tasks, at least one if it is above 0; but with a single task, nothing."""
    tasks = sorted({sample.group for sample in samples})
    count = 0 if share == 0 or len(tasks) < 2 else min(len(tasks) - 1, max(1, round(share * len(tasks))))
    held_out = set(random.Random(seed).sample(tasks, count))
    return Split(
        [sample for sample in samples if sample.group not in held_out],
        [sample for sample in samples if sample.group in held_out],
    )
