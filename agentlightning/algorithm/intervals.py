"""How sure a mean is: an interval that holds the true one with the stated confidence, or nearly so.

Which one depends on what the values can hide:

- Zeros and ones hide nothing but how many there are of each: Wilson's interval.
- Other values from 0 to 1 may be like each other because the rare ones were not seen. So each bound counts one value
  more than there is, the worst there can be: a 0 for the lower bound, a 1 for the upper. Values that are all the same
  therefore still have an interval, and it stays within 0 and 1.
- Values beyond 0 and 1 can be of any size: Student's interval. Of those that are all the same it knows no spread, and
  so no bounds.

A rollout that failed has no reward of its own. Whether it counts in a mean, and with which reward, is a `FailedReward`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev, stdev
from typing import Literal, get_args

from agentlightning.errors import ConfigurationError
from agentlightning.types.rewards import LARGEST_REWARD
from agentlightning.utils.json_values import JsonObject

FailedChoice = Literal["worst", "skip"]
FailedReward = FailedChoice | float
"""What a rollout that failed counts: the worst reward, which is 0 or the smallest beside it if that is negative;
nothing, so that it is left out; or this number."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and where the true one may lie."""

    mean: float
    low: float
    high: float
    n: int
    """How many values there are, those of failed rollouts that count among them."""
    failed: int = 0
    """How many rollouts failed."""
    failed_reward: float | None = None
    """What each of them counts; None if they are left out, and if there are none."""

    def __str__(self) -> str:
        failed = f", {self.failed_words}" if self.failed else ""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n}{failed})"

    @property
    def failed_words(self) -> str:
        """How many rollouts failed, and what that does to the mean."""
        return f"{self.failed} failed and {effect_of_failed(self.failed_reward)}" if self.failed else "none failed"


def summary_of(found: Estimate | None) -> JsonObject | None:
    """An estimate for the summary of a run, without what is not finite."""
    if found is None:
        return None
    return {key: value for key, value in vars(found).items() if value is not None and math.isfinite(value)}


def is_finite(reward: float) -> bool:
    """Whether a reward can be compared with others."""
    return abs(reward) <= LARGEST_REWARD  # which NaN is not


def check_failed_reward(name: str, value: object) -> None:
    """ConfigurationError, with the name of the setting, for what is no `FailedReward`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number and value not in get_args(FailedChoice):
        raise ConfigurationError(f"{name} is {value!r}; it must be 'worst', 'skip' or a finite number.")


def reward_of_failed(failed: FailedReward, rewards: Sequence[float]) -> float | None:
    """What a rollout that failed counts beside rollouts with these rewards; None if it is left out."""
    if failed == "skip":
        return None
    return min([0.0, *rewards]) if failed == "worst" else float(failed)


def effect_of_failed(reward: float | None) -> str:
    """What becomes of rollouts that failed, in words."""
    return "are left out" if reward is None else f"count {reward:g}"


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The mean of independent values; ConfigurationError if there are none."""
    if not values:
        raise ConfigurationError("There are no rewards, so there is no mean.")
    deviations = NormalDist().inv_cdf(0.5 + confidence / 2)
    if all(value in (0, 1) for value in values):
        return _of_zeros_and_ones(values, deviations)
    if all(0 <= value <= 1 for value in values):
        low = _lower_bound(values, deviations)
        high = 1 - _lower_bound([1 - value for value in values], deviations)
        return Estimate(fmean(values), low, high, len(values))
    n, mean = len(values), fmean(values)
    spread = stdev(values) if n > 1 else 0.0
    if spread == 0:
        return Estimate(mean, -math.inf, math.inf, n)
    half = student_quantile(0.5 + confidence / 2, n - 1) * spread / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def _of_zeros_and_ones(values: Sequence[float], deviations: float) -> Estimate:
    n, mean, square = len(values), fmean(values), deviations * deviations
    middle = (mean + square / (2 * n)) / (1 + square / n)
    half = deviations / (1 + square / n) * math.sqrt(mean * (1 - mean) / n + square / (4 * n * n))
    low, high = min(middle - half, mean), max(middle + half, mean)  # as they are, but for rounding
    return Estimate(mean, max(0.0, low), min(1.0, high), n)


def _lower_bound(values: Sequence[float], deviations: float) -> float:
    """Of the mean of values from 0 to 1, as if one 0 had been seen besides them."""
    seen = [*values, 0.0]
    return max(0.0, fmean(seen) - deviations * pstdev(seen) / math.sqrt(len(seen)))


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution above its middle, found by halving the angle whose tangent it is."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _student_share(angle: float, degrees: int) -> float:
    """How likely a value lies within `sqrt(degrees) * tan(angle)` of the middle (Abramowitz and Stegun, 26.7.3-4)."""
    is_odd, square = degrees % 2, math.cos(angle) ** 2
    term, total = math.sin(angle) * (math.cos(angle) if is_odd else 1.0), 0.0
    for number in range(1 + is_odd, degrees, 2):
        total += term
        term *= square * number / (number + 1)
    return (angle + total) * 2 / math.pi if is_odd else total
