"""Rollouts become samples: token sequences with an advantage, ready for the learner.

A rollout is judged as a whole, unless the settings judge its turns. All its sequences get its advantage, which comes
from comparing its reward with those of the other rollouts of its group; every rollout that succeeded and has a reward
takes part in that comparison, also where its tokens cannot be learned from, and its sequences count in the means of the
loss. Whatever is left out is counted with its reason, so that a step that teaches nothing can say why. A failure of the
infrastructure is no lesson, so a rollout that failed has no reward, unless the settings give it one.

An answer that was cut off is no lesson either: the reward judges an end that the model did not choose. One such answer,
wherever it stands, makes its sequence truncated, and the sequence is left out whole, for what follows builds on that
answer. Other sequences of the rollout stay. The finish reason of its call says whether an answer was cut off; one
that has none counts as whole, unless it is to be guessed from its last token.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import fsum
from typing import TYPE_CHECKING, Final

from agentlightning.adapter.trajectory import DropReason, SampledCall, TokenSequence
from agentlightning.algorithm.batches import FinishedRollout, TrainingUse
from agentlightning.algorithm.comparison import is_finite, reward_of_failed
from agentlightning.algorithm.grpo.advantages import (
    Advantages,
    ComparedReward,
    Degenerate,
    advantages,
    advantages_by,
    are_same,
    overlong_penalty,
    returns_to_go,
    rewards_of_turns,
)
from agentlightning.algorithm.grpo.batch_report import BatchReport, SameGroup
from agentlightning.algorithm.grpo.settings import OVERLONG_SHARE, SampleSettings
from agentlightning.algorithm.grpo.skipped import Skipped, flaws_of, version_numbers, warn_of_choices
from agentlightning.errors import ConfigurationError

if TYPE_CHECKING:  # which needs torch
    from agentlightning.engine.model import CausalModel

MOST_ADVANTAGE: Final = 1e9  # squared and summed over all weights, gradients of more are infinite in 32 bits


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
    token_advantages: list[float] | None = None
    """Where turns are judged by themselves, of each token; None gives all `advantage`."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the log-probability of every chosen token is known."""
        return all(logprob is not None for logprob, chosen in zip(self.logprobs, self.loss_mask, strict=True) if chosen)


@dataclass(frozen=True)
class Sampled:
    """What all sequences of a step add up to, also those that teach nothing: what means of the step divide by."""

    sequences: int
    weight: float
    tokens: float
    """Chosen ones, each times the weight of its sequence."""


@dataclass(frozen=True)
class Batch:
    """What a step learns from."""

    samples: list[Sample]
    report: BatchReport
    sampled: Sampled | None = None
    """What the means of the loss are over; None takes the samples alone."""
    uses: Mapping[str, TrainingUse] = field(default_factory=dict)
    """What became of each rollout, by id."""


def batch_of(
    outcomes: Sequence[FinishedRollout],
    settings: SampleSettings,
    *,
    current_version: int | None = None,
    end_ids: AbstractSet[int] = frozenset(),
    model: "CausalModel | None" = None,
    replaced_groups: int = 0,
    seen_rewards: Sequence[float] = (),
) -> Batch:
    """The samples of the rollouts of a step, in their order, and a report of what was left out.

    Args:
        outcomes: Rollouts of any number of groups.
        settings: Which of them count, and how.
        current_version: Of the weights that will learn; needed to know how stale a sample is.
        end_ids: Tokens with which the model ends an answer; needed for `guess_truncated`, unless the model is given.
        model: That will learn; sequences that it cannot have sampled are left out. None learns from all.
        replaced_groups: So many of the groups that teach nothing were replaced by others, and do not count.
        seen_rewards: The lowest and the highest of earlier steps, by which all right is told from all wrong.
    """
    end_ids = end_ids or (frozenset() if model is None else model.end_ids)
    if settings.guess_truncated and not end_ids:
        raise ConfigurationError("guess_truncated needs end_ids, the tokens with which the model ends an answer.")
    if settings.max_staleness is not None and current_version is None:
        raise ConfigurationError("max_staleness needs current_version, the version of the weights that will learn.")
    samples: list[Sample] = []
    groups = {outcome.group for outcome in outcomes}
    report = BatchReport(len(outcomes), len(groups), samples=samples, current_version=current_version)
    outcomes = [_sound(outcome, model, report) for outcome in outcomes]
    sieve = _Sieve(settings, report, current_version, end_ids)
    sampled_of: dict[str, list[Sampled]] = {}
    for judged in _judged(outcomes, settings, report, seen_rewards):
        group = judged.outcome.group
        sampled_of.setdefault(group, []).append(_sampled(judged.outcome, settings))
        found = sieve.samples_of(judged) if judged.is_lesson else []
        samples += found
        report.rollouts_used += bool(found)
    used = {sample.group for sample in samples}
    for group in [group for group in sampled_of if group not in used][:replaced_groups]:
        del sampled_of[group]
    everything = [one for group in sampled_of.values() for one in group]
    report.sequences = sum(one.sequences for one in everything)
    weight, tokens = fsum(one.weight for one in everything), fsum(one.tokens for one in everything)
    return Batch(samples, report, Sampled(report.sequences, weight, tokens), _uses(outcomes, samples, report))


def _uses(
    outcomes: Iterable[FinishedRollout], samples: Iterable[Sample], report: BatchReport
) -> dict[str, TrainingUse]:
    advantage_of = {sample.rollout_id: sample.advantage for sample in samples}
    uses: dict[str, TrainingUse] = {}
    for outcome in outcomes:
        key = outcome.rollout_id
        dropped = () if outcome.trajectory is None else outcome.trajectory.dropped
        calls = {call.span_id: call.reason.value for call in dropped if call.same_call_span_id is None}
        reason = None if key in advantage_of else report.left_out[key].value
        uses[key] = TrainingUse(reason, advantage_of.get(key), {**calls, **report.calls_left_out.get(key, {})})
    return uses


def _trainable(outcome: FinishedRollout) -> list[TokenSequence]:
    sequences = () if outcome.trajectory is None else outcome.trajectory.sequences
    return [sequence for sequence in sequences if any(sequence.loss_mask)]


def _same_group(outcomes: Sequence[FinishedRollout], lowest: float, highest: float) -> SameGroup:
    """What a group without variance is; where all rewards that were seen are the same, 1 is right and 0 is wrong."""
    reward = outcomes[0].reward or 0.0
    if are_same(lowest, highest):
        lowest, highest = min(0.0, lowest), max(1.0, highest)
    kind = "all_right" if are_same(reward, highest) else "all_wrong" if are_same(lowest, reward) else "same"
    answers = {tuple(sequence.sampled_ids for sequence in _trainable(outcome)) for outcome in outcomes}
    return SameGroup(reward, kind, len(outcomes) > 1 and len(answers) == 1 and any(answers))


def _weight(sequences: Sequence[TokenSequence], settings: SampleSettings) -> float:
    """Of each of the sequences of a rollout."""
    return 1.0 if settings.rollout_weighting == "sequence" else 1.0 / max(1, len(sequences))


def _sampled(outcome: FinishedRollout, settings: SampleSettings) -> Sampled:
    sequences = _trainable(outcome)
    weight = _weight(sequences, settings)
    tokens = sum(sum(sequence.loss_mask) for sequence in sequences)
    return Sampled(len(sequences), weight * len(sequences), weight * tokens)


# ---------------------------------------------------------------------- what rollouts are worth


@dataclass(frozen=True)
class _Judged:
    """A rollout that has a reward."""

    outcome: FinishedRollout
    advantages: Sequence[float]
    """One, or one for each of its model calls."""
    is_lesson: bool
    """False for one that cannot be told from the others of its group."""


def _judged(
    outcomes: Sequence[FinishedRollout],
    settings: SampleSettings,
    report: BatchReport,
    seen_rewards: Sequence[float],
) -> list[_Judged]:
    """Rollouts with their advantages, less those that have no reward."""
    scored = _scored(outcomes, settings, report)
    values = [_returns(outcome, settings, report) for outcome in scored]
    own_rewards = [[call.reward for call in calls] for calls in map(_calls, scored) if calls]
    if any(reward is not None for own in own_rewards for reward in own):
        report.call_rewards = [fsum(one for one in own if one is not None and is_finite(one)) for own in own_rewards]
    if settings.credit == "turn":
        scored = [replace(outcome, reward=first_return(outcome, settings.discount)) for outcome in scored]
        groups = [f"{one.group}/{turn}" for one, own in zip(scored, values, strict=True) for turn in range(len(own))]
    else:
        groups = [outcome.group for outcome in scored]
    report.rewards = [outcome.reward for outcome in scored if outcome.reward is not None]
    found = _advantages(scored, values, groups, settings)
    judged: list[_Judged] = []
    same: dict[str, list[FinishedRollout]] = {}
    start = 0
    for outcome, own in zip(scored, values, strict=True):
        end = start + len(own)
        reasons = [found.degenerate.get(group) for group in groups[start:end]]
        is_lesson = None in reasons
        if Degenerate.NO_VARIANCE in reasons and not is_lesson:
            report.skip(outcome.rollout_id, Skipped.NO_VARIANCE)
            same.setdefault(outcome.group, []).append(outcome)
        elif not is_lesson:
            report.skip(outcome.rollout_id, Skipped.GROUP_TOO_SMALL if own else Skipped.EMPTY_TRACE)
        bounded = [max(-MOST_ADVANTAGE, min(value, MOST_ADVANTAGE)) for value in found.values[start:end]]
        judged.append(_Judged(outcome, bounded, is_lesson))
        start = end
    known = [*report.rewards, *seen_rewards]
    report.same = [_same_group(group, min(known), max(known)) for group in same.values()]
    return judged


def _advantages(
    scored: Sequence[FinishedRollout],
    values: Sequence[Sequence[float]],
    groups: Sequence[str],
    settings: SampleSettings,
) -> Advantages:
    """What the rewards of rollouts, or of their turns, are worth beside the others of their groups."""
    flat = [value for own in values for value in own]
    if not callable(settings.advantage):
        return advantages(flat, settings.advantage, groups=groups, min_group_size=settings.min_group_size)
    calls: list[tuple[str, list[tuple[int, str]]]] = []  # by rollout or turn: their lengths and agents
    for outcome in scored:
        sequences = () if outcome.trajectory is None else outcome.trajectory.sequences
        own = [(call.end - call.start, one.agent_name) for one in sequences for call in one.calls]
        calls += [
            (outcome.rollout_id, part) for part in ([[one] for one in own] if settings.credit == "turn" else [own])
        ]
    return advantages_by(
        settings.advantage,
        [
            ComparedReward(
                reward=reward,
                group=group,
                rollout_id=rollout_id,
                lengths=tuple(length for length, _ in own),
                agents=tuple(agent for _, agent in own),
            )
            for reward, group, (rollout_id, own) in zip(flat, groups, calls, strict=True)
        ],
    )


def _scored(
    outcomes: Sequence[FinishedRollout], settings: SampleSettings, report: BatchReport
) -> list[FinishedRollout]:
    """Rollouts that have a reward, or are given one."""
    scored: list[FinishedRollout] = []
    usable = [one.reward for one in outcomes if one.reward is not None and _without_reward(one) is None]
    counted = reward_of_failed(settings.failed, usable)
    for outcome in outcomes:
        reason = _without_reward(outcome)
        if reason is None:
            scored.append(outcome)
        elif counted is not None:
            scored.append(replace(outcome, reward=counted, counts_as_failed=True))
        else:
            report.skip(outcome.rollout_id, reason)
        if reason is Skipped.FAILED:
            report.errors[outcome.error or f"status '{outcome.status}'"] += 1
    return scored


def first_return(outcome: FinishedRollout, discount: float) -> float | None:
    """The return of the first turn of a rollout; its reward if it has no turns."""
    rewards = _turn_rewards(outcome)
    return returns_to_go(rewards, discount)[0] if rewards else outcome.reward


def _calls(outcome: FinishedRollout) -> list[SampledCall]:
    return [] if outcome.trajectory is None else [call for one in outcome.trajectory.sequences for call in one.calls]


def _turn_rewards(outcome: FinishedRollout) -> list[float]:
    rewards = [call.reward if is_finite(call.reward or 0.0) else None for call in _calls(outcome)]
    return rewards_of_turns(rewards, outcome.reward or 0.0, is_failed=outcome.status == "failed")


def _returns(outcome: FinishedRollout, settings: SampleSettings, report: BatchReport) -> list[float]:
    """What a rollout is compared by: its reward, or what follows from each of its turns on; less what is too long."""
    assert outcome.reward is not None
    calls = _calls(outcome)
    penalties = [0.0] * len(calls)
    if settings.longest_answer is not None:
        buffer = settings.overlong_buffer or max(1, settings.longest_answer // OVERLONG_SHARE)
        penalties = [overlong_penalty(call.end - call.start, settings.longest_answer, buffer) for call in calls]
        report.penalties.append(min(penalties, default=0.0))
    if settings.credit == "rollout":
        return [outcome.reward + min(penalties, default=0.0)]
    both = [reward + penalty for reward, penalty in zip(_turn_rewards(outcome), penalties, strict=True)]
    return returns_to_go(both, settings.discount)


def _without_reward(outcome: FinishedRollout) -> Skipped | None:
    if outcome.status != "succeeded":
        return Skipped.FAILED
    if outcome.reward is None:
        return Skipped.NO_REWARD
    return None if is_finite(outcome.reward) else Skipped.BAD_REWARD


# ---------------------------------------------------------------------- which sequences can be learned from


@dataclass(frozen=True)
class _Sieve:
    """Lets through the sequences that can be learned from."""

    settings: SampleSettings
    report: BatchReport
    current_version: int | None
    end_ids: AbstractSet[int]

    def samples_of(self, judged: _Judged) -> list[Sample]:
        outcome = judged.outcome
        if outcome.trajectory is None or outcome.trajectory.n_calls == 0:
            if outcome.rollout_id not in self.report.left_out:
                self.report.skip(outcome.rollout_id, Skipped.EMPTY_TRACE)
            return []
        sequences = _trainable(outcome)
        if not sequences and outcome.rollout_id not in self.report.left_out:
            self.report.skip(outcome.rollout_id, Skipped.NO_TOKENS)
        of_calls = iter(judged.advantages)
        samples: list[Sample] = []
        for sequence in outcome.trajectory.sequences:
            turns: list[float] | None = None
            if self.settings.credit == "turn":
                turns = [0.0] * len(sequence.token_ids)
                for call in sequence.calls:
                    turns[call.start : call.end] = [next(of_calls)] * (call.end - call.start)
            if not any(sequence.loss_mask):
                continue
            reason = self._reason(sequence)
            if reason is not None:
                self.report.skip(outcome.rollout_id, reason, sequence.calls)
                continue
            for version, tokens in Counter(sequence.weights_versions).items():
                self.report.tokens_by_version.update(dict.fromkeys(version_numbers([version]), tokens))
            self.report.without_finish_reason += any(call.finish_reason is None for call in sequence.calls)
            samples.append(
                Sample(
                    token_ids=list(sequence.token_ids),
                    loss_mask=list(sequence.loss_mask),
                    logprobs=list(sequence.logprobs),
                    advantage=judged.advantages[0],
                    version=min(version_numbers(sequence.weights_versions), default=None),
                    group=outcome.group,
                    rollout_id=outcome.rollout_id,
                    temperature=self.settings.temperature,
                    weight=_weight(sequences, self.settings),
                    token_advantages=turns,
                )
            )
        return samples

    def _reason(self, sequence: TokenSequence) -> Skipped | None:
        settings = self.settings
        truncated = sum(self._is_truncated(sequence, call) for call in sequence.calls)
        self.report.truncated_calls += truncated
        if sequence.is_aborted or (truncated and settings.skip_truncated):
            return Skipped.TRUNCATED
        if settings.max_tokens is not None and len(sequence.token_ids) > settings.max_tokens:
            return Skipped.TOO_LONG
        version = min(version_numbers(sequence.weights_versions), default=None)
        if settings.max_staleness is None or self.current_version is None or version is None:
            return None
        return Skipped.TOO_STALE if self.current_version - version > settings.max_staleness else None

    def _is_truncated(self, sequence: TokenSequence, call: SampledCall) -> bool:
        if call.finish_reason is None and self.settings.guess_truncated:
            return sequence.token_ids[call.end - 1] not in self.end_ids
        return call.is_truncated


def _sound(outcome: FinishedRollout, model: "CausalModel | None", report: BatchReport) -> FinishedRollout:
    """A rollout without the sequences that the model cannot have sampled; they count for nothing, not even in means."""
    if outcome.unreadable is not None:
        report.skip(outcome.rollout_id, Skipped.BAD_SAMPLE)
    trajectory = outcome.trajectory
    if trajectory is None:
        return outcome
    choices = sum(call.reason is DropReason.OTHER_CHOICE for call in trajectory.dropped)
    report.skipped[Skipped.OTHER_CHOICE] += choices
    if choices:
        warn_of_choices()
    flaws = flaws_of(trajectory, model, report.current_version)
    for number in flaws:
        report.skip(outcome.rollout_id, Skipped.BAD_SAMPLE, trajectory.sequences[number].calls)
    if not flaws:
        return outcome
    sound = tuple(sequence for number, sequence in enumerate(trajectory.sequences) if number not in flaws)
    return replace(outcome, trajectory=trajectory.model_copy(update={"sequences": sound, "breaks": ()}))
