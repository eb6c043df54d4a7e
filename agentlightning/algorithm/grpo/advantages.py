"""How much better a rollout was than could be expected: rewards become advantages.

What could be expected is what the other rollouts show, those of the same task (a group) or those of the whole batch:

    grpo                 (reward - mean of the group) / standard deviation of the group
    grpo_no_std          reward - mean of the group                                         (Dr. GRPO)
    rloo                 reward - mean of the others of the group                           (leave one out)
    grpo_batch_std       (reward - mean of the group) / standard deviation of all rewards of the batch
    reinforce_plus_plus  (reward - mean of the batch) / standard deviation of the batch

Or a function of the user's own compares them. Standard deviations are those of a sample (n - 1). Where nothing can be
compared, advantages are zero, and the reason is named: never a division by nothing, never a number that is not finite.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import Final, Literal

from typing_extensions import assert_never

from agentlightning.algorithm.comparison import is_finite
from agentlightning.errors import ConfigurationError

AdvantageKind = Literal["grpo", "grpo_no_std", "grpo_batch_std", "rloo", "reinforce_plus_plus"]


@dataclass(frozen=True, kw_only=True)
class ComparedReward:
    """A reward that is compared with others: that of a rollout, or with `credit="turn"` the return of one turn."""

    reward: float
    """With the penalty for too long answers, if there is one."""
    group: str
    """The same for what tried the same task in the same step; with turns, for the same turn of it."""
    rollout_id: str
    lengths: tuple[int, ...]
    """Tokens that the model chose in each of its calls; with turns, in this one."""
    agents: tuple[str, ...]
    """Which agent made each of these calls."""


AdvantageFunction = Callable[[Sequence[ComparedReward]], Sequence[float]]
"""From all rewards of a step to one advantage each. Groups that teach nothing by their rewards are still there; one in
which every advantage is 0 is not learned from."""

SAME: Final = 1e-9
"""Rewards that differ by no more than this share of their size are the same."""


class Degenerate(str, Enum):
    """Why the rewards of a group say nothing."""

    TOO_SMALL = "too_small"
    """There are too few rewards to compare."""
    NO_VARIANCE = "no_variance"
    """All rewards are the same."""


@dataclass(frozen=True)
class Advantages:
    """One advantage for each reward, in the same order."""

    values: list[float]
    """Zero where there is nothing to compare, and for rewards that are not finite."""
    degenerate: dict[str, Degenerate] = field(default_factory=dict)
    """Groups from which nothing can be learned."""
    not_finite: list[int] = field(default_factory=list)
    """Places of rewards that are no finite numbers; the others are computed as if these were not there."""


def advantages(
    rewards: Sequence[float],
    kind: AdvantageKind = "grpo",
    *,
    groups: Sequence[str] | None = None,
    min_group_size: int = 2,
) -> Advantages:
    """Compare rewards within their groups; without `groups` they are one group.

    With "reinforce_plus_plus" the whole batch is compared, so a group is degenerate only if the batch is.
    """
    names = list(groups) if groups is not None else [""] * len(rewards)
    if len(names) != len(rewards):
        raise ValueError(f"There are {len(rewards)} rewards and {len(names)} names of groups; give one for each.")
    result = Advantages([0.0] * len(rewards))
    places: dict[str, list[int]] = {name: [] for name in names}
    for place, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        (places[name] if is_finite(reward) else result.not_finite).append(place)
    finite = [reward for reward in rewards if is_finite(reward)]
    scale = _deviation(finite) if kind == "grpo_batch_std" and len(finite) > 1 else None
    units = [list(places)] if kind == "reinforce_plus_plus" else [[name] for name in places]
    for unit in units:
        members = [place for name in unit for place in places[name]]
        found = [rewards[place] for place in members]
        if len(found) < max(2, min_group_size):
            result.degenerate.update(dict.fromkeys(unit, Degenerate.TOO_SMALL))
            continue
        if are_same(min(found), max(found)):
            result.degenerate.update(dict.fromkeys(unit, Degenerate.NO_VARIANCE))
            continue
        for place, value in zip(members, _compared(found, kind, scale), strict=True):
            result.values[place] = value
    return result


def advantages_by(function: AdvantageFunction, compared: Sequence[ComparedReward]) -> Advantages:
    """What a user's function says; ConfigurationError if that is not one finite number for each reward."""
    values = [float(value) for value in function(compared)]
    if len(values) != len(compared) or not all(map(is_finite, values)):
        name = getattr(function, "__qualname__", repr(function))
        wrong = [value for value in values if not is_finite(value)]
        found = f"{len(values)} advantages" if len(values) != len(compared) else f"the advantage {wrong[0]}"
        raise ConfigurationError(
            f"The advantage function {name} returned {found}; return a finite number for each of the {len(compared)} "
            "rewards."
        )
    taught = {one.group for one, value in zip(compared, values, strict=True) if value}
    degenerate = {one.group: Degenerate.NO_VARIANCE for one in compared if one.group not in taught}
    return Advantages(values, degenerate)


def are_same(low: float, high: float) -> bool:
    """Whether rewards from `low` to `high` are the same, but for rounding."""
    return high - low <= SAME * max(abs(low), abs(high))


def rewards_of_turns(rewards: Sequence[float | None], whole: float, *, is_failed: bool) -> list[float]:
    """The reward of each turn of a rollout, whose own reward `whole` is the last turn's if no turn has any.

    A rollout that failed has no other reward than `whole`.
    """
    of_turns = [reward or 0.0 for reward in rewards]
    if of_turns and (is_failed or all(reward is None for reward in rewards)):
        of_turns[-1] = whole
    return of_turns


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """What follows from each turn on: its reward, and those of later turns, discounted once for each turn between."""
    found: list[float] = []
    for reward in reversed(rewards):
        found.append(reward + discount * (found[-1] if found else 0.0))
    return found[::-1]


def overlong_penalty(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft punishment of an answer: 0 up to `longest - buffer` tokens, -1 from `longest` on, linear between."""
    return max(-1.0, min(0.0, (longest - buffer - tokens) / buffer))


def _deviation(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) + 1e-6


def _compared(rewards: Sequence[float], kind: AdvantageKind, scale: float | None) -> list[float]:
    n, mean = len(rewards), fmean(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "grpo" or kind == "grpo_batch_std" or kind == "reinforce_plus_plus":
        scale = _deviation(rewards) if scale is None else scale
        return [value / scale for value in centred]
    if kind == "grpo_no_std":
        return centred
    if kind == "rloo":  # reward - (sum - reward) / (n - 1), which is the same
        return [value * n / (n - 1) for value in centred]
    assert_never(kind)
