"""Rollouts become samples: token sequences with an advantage, ready for the learner.

A rollout is judged as a whole. All its sequences get its advantage, which comes from comparing its reward with those of
the other rollouts of its group; every rollout that succeeded and has a reward takes part in that comparison, also where
its tokens cannot be learned from. Whatever is left out is counted with its reason, so that a step that teaches nothing
can say why. A failure of the infrastructure is no lesson, so a rollout that failed has no reward, unless the settings
give it one.

An answer that was cut off is no lesson either: the reward judges an end that the model did not choose. One such answer,
wherever it stands, makes its sequence truncated, and the sequence is left out whole, for what follows builds on that
answer. Other sequences of the rollout stay. The finish reason of its call says whether an answer was cut off; one
that has none counts as whole, unless it is to be guessed from its last token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import fmean
from typing import Literal

from agentlightning.adapter.trajectory import SampledCall, TokenSequence, Trajectory
from agentlightning.algorithm.grpo.advantages import AdvantageKind, Degenerate, advantages
from agentlightning.algorithm.grpo.settings import check_choice
from agentlightning.algorithm.intervals import FailedReward, check_failed_reward, is_finite, reward_of_failed
from agentlightning.errors import ConfigurationError

__all__ = ["Batch", "BatchReport", "RolloutOutcome", "Sample", "SampleSettings", "Skipped", "batch_of"]

RolloutWeighting = Literal["sequence", "rollout"]


@dataclass(frozen=True)
class RolloutOutcome:
    """What became of one rollout."""

    rollout_id: str
    group: str
    """Rollouts of the same task, in the same step, have the same."""
    status: str
    reward: float | None
    trajectory: Trajectory | None
    error: str | None = None


@dataclass(frozen=True)
class Sample:
    """A token sequence to learn from; the three lists are equally long."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 where the model chose the token."""
    logprobs: list[float | None]
    """Of the chosen tokens, by the engine that sampled them; None elsewhere, or where they are not known."""
    advantage: float
    version: int | None
    """Of the oldest weights that chose one of the tokens; None if not known."""
    group: str
    rollout_id: str
    temperature: float = 1.0
    """With which it was sampled, and with which its log-probabilities are computed; 0 (greedy) computes as 1 does."""
    weight: float = 1.0
    """How much the sequence counts beside others."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the log-probability of every chosen token is known."""
        return all(logprob is not None for logprob, chosen in zip(self.logprobs, self.loss_mask, strict=True) if chosen)


class Skipped(str, Enum):
    """Why something was not learned from; of rollouts, of groups, or of single sequences."""

    FAILED = "failed"
    """A rollout that did not succeed."""
    NO_REWARD = "no_reward"
    """A rollout without a reward."""
    BAD_REWARD = "bad_reward"
    """A rollout whose reward is not a finite number."""
    GROUP_TOO_SMALL = "group_too_small"
    """Rollouts of a group of which too few have a reward."""
    NO_VARIANCE = "no_variance"
    """Rollouts of a group whose rewards are all the same."""
    EMPTY_TRACE = "empty_trace"
    """A rollout in whose trace there are no model calls."""
    NO_TOKENS = "no_tokens"
    """A rollout whose calls were recorded without tokens, or are not to be trained."""
    TRUNCATED = "truncated"
    """A sequence with an answer that was cut off or broken off, at its end or before."""
    TOO_LONG = "too_long"
    """A sequence of more tokens than allowed."""
    TOO_STALE = "too_stale"
    """A sequence sampled from weights that are too old."""


_OF_SEQUENCES = frozenset([Skipped.TRUNCATED, Skipped.TOO_LONG, Skipped.TOO_STALE])


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Which rollouts count, and how; ConfigurationError names the value that cannot be used."""

    advantage: AdvantageKind = "grpo"
    failed: FailedReward = "skip"
    """What a rollout that failed counts: "skip" leaves it out, because it may be the machine's fault; "worst" is 0, or
    the smallest reward of the batch if that is negative; a number is its reward. If it counts, it is learned from."""
    min_group_size: int = 2
    """Rewards that a group needs; with "reinforce_plus_plus", that the batch needs."""
    skip_truncated: bool = True
    """Leave out sequences with an answer that was cut off; False learns from them as from any other, but for those that
    the server broke off."""
    guess_truncated: bool = False
    """Where the finish reason of a call was not recorded, an answer that does not end with an end token counts as cut
    off; that is wrong for those that a stop text ended."""
    max_tokens: int | None = None
    """Longer sequences are left out."""
    max_staleness: int | None = None
    """Sequences sampled from weights that are more versions old than this are left out."""
    rollout_weighting: RolloutWeighting = "sequence"
    """Every sequence counts 1; or every rollout counts 1, and its sequences share that equally."""
    temperature: float = 1.0
    """With which the rollouts were sampled."""

    def __post_init__(self) -> None:
        check_choice("advantage", self.advantage, AdvantageKind)
        check_choice("rollout_weighting", self.rollout_weighting, RolloutWeighting)
        check_failed_reward("failed", self.failed)
        for name, least in (("min_group_size", 2), ("max_tokens", 2), ("max_staleness", 0), ("temperature", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigurationError(f"{name} is {value!r}; it must be at least {least}.")


@dataclass
class BatchReport:
    """What a batch was made of, and what was left out of it."""

    rollouts: int = 0
    groups: int = 0
    groups_used: int = 0
    """Groups of which at least one sample is in the batch."""
    rollouts_used: int = 0
    samples: int = 0
    sampled_tokens: int = 0
    without_logprobs: int = 0
    """Samples whose old log-probabilities the learner has to compute itself."""
    without_version: int = 0
    """Samples of which it is not known which weights chose them."""
    without_finish_reason: int = 0
    """Samples with an answer of which it was not recorded why it ended; where that is guessed, they are counted too."""
    truncated_calls: int = 0
    """Answers that were cut off, in sequences that were used or skipped."""
    staleness: list[int] = field(default_factory=list)
    """Of each sample whose version is known: how many versions old."""
    rewards: list[float] = field(default_factory=list)
    skipped: Counter[Skipped] = field(default_factory=Counter)
    """Rollouts by reason; for TRUNCATED, TOO_LONG and TOO_STALE, sequences."""
    errors: Counter[str] = field(default_factory=Counter)
    """What failed rollouts said."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the record of a step; every reason is there, also where its count is zero."""
        found: dict[str, float] = {
            "rollouts/all": self.rollouts,
            "rollouts/used": self.rollouts_used,
            "groups/all": self.groups,
            "groups/used": self.groups_used,
            "samples/used": self.samples,
            "samples/tokens": self.sampled_tokens,
            "samples/without_logprobs": self.without_logprobs,
            "samples/without_version": self.without_version,
            "samples/without_finish_reason": self.without_finish_reason,
            "samples/truncated_calls": self.truncated_calls,
        }
        if self.rewards:
            found |= {"reward/mean": fmean(self.rewards), "reward/max": max(self.rewards)}
            found["reward/min"] = min(self.rewards)
        if self.staleness:
            found |= {"staleness/mean": fmean(self.staleness), "staleness/max": max(self.staleness)}
        return found | {f"skipped/{reason.value}": float(self.skipped[reason]) for reason in Skipped}

    def words(self) -> str:
        """One sentence: what was used, and why the rest was not."""
        used = (
            f"{self.rollouts_used} of {self.rollouts} rollouts in {self.groups_used} of {self.groups} groups were used"
        )
        reasons = [
            f"{count} {'sequences' if reason in _OF_SEQUENCES else 'rollouts'} {reason.value}"
            for reason, count in self.skipped.most_common()
            if count
        ]
        left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
        error = f" (most often: {self.errors.most_common(1)[0][0]})" if self.errors else ""
        return f"{used}{left_out}{error}."


@dataclass(frozen=True)
class Batch:
    """What a step learns from."""

    samples: list[Sample]
    report: BatchReport


def batch_of(
    outcomes: Sequence[RolloutOutcome],
    settings: SampleSettings,
    *,
    current_version: int | None = None,
    end_ids: AbstractSet[int] = frozenset(),
) -> Batch:
    """The samples of the rollouts of a step, in their order, and a report of what was left out.

    Args:
        outcomes: Rollouts of any number of groups.
        settings: Which of them count, and how.
        current_version: Of the weights that will learn; needed to know how stale a sample is.
        end_ids: Tokens with which the model ends an answer; needed for `guess_truncated`.
    """
    if settings.guess_truncated and not end_ids:
        raise ConfigurationError("guess_truncated needs end_ids, the tokens with which the model ends an answer.")
    if settings.max_staleness is not None and current_version is None:
        raise ConfigurationError("max_staleness needs current_version, the version of the weights that will learn.")
    report = BatchReport(rollouts=len(outcomes), groups=len({outcome.group for outcome in outcomes}))
    batch = Batch([], report)
    sieve = _Sieve(settings, report, current_version, end_ids)
    groups_used: set[str] = set()
    for outcome, advantage in _judged(outcomes, settings, report):
        samples = sieve.samples_of(outcome, advantage)
        if samples:
            batch.samples.extend(samples)
            report.rollouts_used += 1
            groups_used.add(outcome.group)
    report.groups_used = len(groups_used)
    report.samples = len(batch.samples)
    report.sampled_tokens = sum(sum(sample.loss_mask) for sample in batch.samples)
    report.without_logprobs = sum(not sample.has_logprobs for sample in batch.samples)
    versions = [sample.version for sample in batch.samples]
    report.without_version = versions.count(None)
    if current_version is not None:
        report.staleness = [current_version - version for version in versions if version is not None]
    return batch


def _judged(
    outcomes: Sequence[RolloutOutcome], settings: SampleSettings, report: BatchReport
) -> list[tuple[RolloutOutcome, float]]:
    """Rollouts with their advantages, less those that have none."""
    scored: list[RolloutOutcome] = []
    usable = [one.reward for one in outcomes if one.reward is not None and _without_reward(one) is None]
    counted = reward_of_failed(settings.failed, usable)
    for outcome in outcomes:
        reason = _without_reward(outcome)
        if reason is None:
            scored.append(outcome)
        elif counted is not None:
            scored.append(replace(outcome, reward=counted))
        else:
            report.skipped[reason] += 1
        if reason is Skipped.FAILED:
            report.errors[outcome.error or f"status '{outcome.status}'"] += 1
    report.rewards = [outcome.reward for outcome in scored if outcome.reward is not None]
    found = advantages(
        report.rewards,
        settings.advantage,
        groups=[outcome.group for outcome in scored],
        min_group_size=settings.min_group_size,
    )
    judged: list[tuple[RolloutOutcome, float]] = []
    for outcome, advantage in zip(scored, found.values, strict=True):
        degenerate = found.degenerate.get(outcome.group)
        if degenerate is None:
            judged.append((outcome, advantage))
        else:
            too_small = degenerate is Degenerate.TOO_SMALL
            report.skipped[Skipped.GROUP_TOO_SMALL if too_small else Skipped.NO_VARIANCE] += 1
    return judged


def _without_reward(outcome: RolloutOutcome) -> Skipped | None:
    if outcome.status != "succeeded":
        return Skipped.FAILED
    if outcome.reward is None:
        return Skipped.NO_REWARD
    return None if is_finite(outcome.reward) else Skipped.BAD_REWARD


@dataclass(frozen=True)
class _Sieve:
    """Lets through the sequences that can be learned from."""

    settings: SampleSettings
    report: BatchReport
    current_version: int | None
    end_ids: AbstractSet[int]

    def samples_of(self, outcome: RolloutOutcome, advantage: float) -> list[Sample]:
        trajectory = outcome.trajectory
        if trajectory is None or trajectory.n_calls == 0:
            self.report.skipped[Skipped.EMPTY_TRACE] += 1
            return []
        sequences = [sequence for sequence in trajectory.sequences if any(sequence.loss_mask)]
        if not sequences:
            self.report.skipped[Skipped.NO_TOKENS] += 1
        kept: list[TokenSequence] = []
        for sequence in sequences:
            reason = self._reason(sequence)
            if reason is None:
                kept.append(sequence)
            else:
                self.report.skipped[reason] += 1
        self.report.without_finish_reason += sum(
            any(call.finish_reason is None for call in sequence.calls) for sequence in kept
        )
        weight = 1.0 if self.settings.rollout_weighting == "sequence" else 1.0 / max(1, len(kept))
        return [
            Sample(
                token_ids=list(sequence.token_ids),
                loss_mask=list(sequence.loss_mask),
                logprobs=list(sequence.logprobs),
                advantage=advantage,
                version=_oldest(sequence.weights_versions),
                group=outcome.group,
                rollout_id=outcome.rollout_id,
                temperature=self.settings.temperature,
                weight=weight,
            )
            for sequence in kept
        ]

    def _reason(self, sequence: TokenSequence) -> Skipped | None:
        settings = self.settings
        truncated = sum(self._is_truncated(sequence, call) for call in sequence.calls)
        self.report.truncated_calls += truncated
        if sequence.is_aborted or (truncated and settings.skip_truncated):
            return Skipped.TRUNCATED
        if settings.max_tokens is not None and len(sequence.token_ids) > settings.max_tokens:
            return Skipped.TOO_LONG
        version = _oldest(sequence.weights_versions)
        if settings.max_staleness is None or self.current_version is None or version is None:
            return None
        return Skipped.TOO_STALE if self.current_version - version > settings.max_staleness else None

    def _is_truncated(self, sequence: TokenSequence, call: SampledCall) -> bool:
        if call.finish_reason is None and self.settings.guess_truncated:
            return sequence.token_ids[call.end - 1] not in self.end_ids
        return call.is_truncated


def _oldest(versions: Iterable[str | None]) -> int | None:
    """The lowest of the versions that are numbers."""
    return min((int(version) for version in set(versions) if version is not None and version.isdecimal()), default=None)
