"""Whether a candidate is better than the incumbent: a paired comparison that may stop at any pair.

Both sides are run on the same tasks, and each task gives one difference of rewards. The test is one by betting: the
wealth of a bet starts at 1, and each pair multiplies it by a factor whose expected value is at most 1 if there is no
gain. Without a gain the wealth will, with probability `1 - alpha`, never reach `1 / alpha` (Ville's inequality),
whatever the number of pairs; so a candidate is better at the first pair at which it does. This needs no assumption
about the rewards but their range. There are bets of several sizes, and the evidence is the mean of their wealths.

A comparison stops before its budget is spent only if the pairs that are left would change its verdict in fewer than one
case in a hundred. This never makes a false promotion likelier.

What the caller must see to: pairs come in the order in which their tasks were drawn, not in the order in which they
finished; a task is one pair (the repeats of a task are averaged first); and the rewards were not used to choose this
candidate among others. To resume a comparison, add the pairs it had to a new one.

How sure a mean is, an interval tells: it holds the true mean with the stated confidence, or nearly so. Which one
depends on what the values can hide:

- Zeros and ones hide nothing but how many there are of each: Wilson's interval.
- Other values from 0 to 1 may be like each other because the rare ones were not seen. So each bound counts one value
  more than there is, the worst there can be: a 0 for the lower bound, a 1 for the upper. Values that are all the same
  therefore still have an interval, and it stays within 0 and 1.
- Values beyond 0 and 1 can be of any size: Student's interval. Of those that are all the same it knows no spread, and
  so no bounds.

A rollout that failed has no reward of its own. Whether it counts in a mean, and with which reward, is a `FailedReward`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev, stdev
from typing import Literal, get_args

from typing_extensions import Self

from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.types.rewards import LARGEST_REWARD
from agentlightning.utils.json_values import JsonObject

__all__ = [
    "Gate",
    "PairedComparison",
    "Verdict",
    "gain_summary",
    "measured_summary",
]

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


# ---------------------------------------------------------------------- comparisons


Verdict = Literal["undecided", "better", "not better"]

BETS = 6
LARGEST_BET = 0.95
"""Below 1, so that a single loss does not make the wealth of a bet zero for ever."""


class PairedComparison:
    """A sequential test of one candidate against the incumbent.

    Args:
        alpha: How likely a candidate without a gain above `min_effect` may be called better.
        max_pairs: The budget; the verdict falls at this pair at the latest.
        min_pairs: No verdict before so many pairs, or before the budget is spent if that is less.
        min_effect: The gain that must be exceeded.
        reward_range: Lowest and highest reward there can be.
    """

    def __init__(
        self,
        alpha: float = 0.05,
        *,
        max_pairs: int = 200,
        min_pairs: int = 8,
        min_effect: float = 0.0,
        reward_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        low, high = reward_range
        if not 0 < alpha < 1:
            raise ConfigurationError(f"alpha must lie between 0 and 1; it is {alpha}.")
        if min_pairs < 1 or max_pairs < 1:
            raise ConfigurationError(f"min_pairs and max_pairs must be at least 1; they are {min_pairs}, {max_pairs}.")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigurationError(f"reward_range must be two finite numbers, lowest first; it is {reward_range}.")
        if not -(high - low) < min_effect < high - low:
            raise ConfigurationError(
                f"min_effect must lie within the differences of {reward_range}; it is {min_effect}."
            )
        self.alpha = alpha
        self.max_pairs = max_pairs
        self.min_pairs = min(min_pairs, max_pairs)
        self.min_effect = min_effect
        self.reward_range = (low, high)
        self._span = high - low
        self._bets = _bets(alpha, max_pairs)
        self._logs = [0.0] * len(self._bets)  # of the wealth of each bet
        self._wins = self._growths(self._span)  # the same, added by a pair that could not be better
        self._differences: list[float] = []
        self._squares = 0.0
        self._verdict: Verdict = "undecided"

    @property
    def verdict(self) -> Verdict:
        """Falls once and stays."""
        return self._verdict

    @property
    def pairs(self) -> int:
        """How many were added."""
        return len(self._differences)

    @property
    def pairs_left(self) -> int:
        """How many more may be added; none once there is a verdict."""
        return self.max_pairs - self.pairs if self._verdict == "undecided" else 0

    @property
    def fewest_pairs(self) -> int:
        """How many pairs a candidate takes that always wins by the whole range; with a smaller budget none succeeds."""
        pairs = self.min_pairs
        while _mean_of_logs([pairs * win for win in self._wins]) < 1 / self.alpha:
            pairs += 1
        return pairs

    @property
    def evidence(self) -> float:
        """The mean wealth of the bets, which began at 1; `1 / alpha` is enough."""
        return _mean_of_logs(self._logs)

    @property
    def estimate(self) -> Estimate:
        """The mean gain, and an interval that holds the true one whenever the comparison ended.

        Either bound is wrong with a probability of at most `alpha`. Of a candidate that is better the lower one is at
        least `min_effect`. The mean of a comparison that ended early flatters the winner; the interval does not.
        """
        if not self._differences:
            raise ConfigurationError("There are no pairs yet, so there is no gain to estimate.")
        negated = [-difference for difference in self._differences]
        low, high = self._lower_bound(self._differences), -self._lower_bound(negated)
        if self._verdict == "better":
            low = max(low, self.min_effect)  # as it is, but for rounding
        return Estimate(fmean(self._differences), low, high, self.pairs)

    @property
    def pairs_needed(self) -> int | None:
        """With how many pairs a comparison would find this gain in four cases of five, if the true one is as it seems.

        None if there is no gain above `min_effect`, or if more pairs than anybody has would be needed.
        """
        if not self._differences or fmean(self._differences) <= self.min_effect:
            return None
        fewest, enough = self.min_pairs, max(self.min_pairs, self.pairs)
        while not self._would_decide(enough):
            fewest, enough = enough, 2 * enough
            if enough > 1_000_000:
                return None
        while enough - fewest > 1:
            middle = (fewest + enough) // 2
            fewest, enough = (fewest, middle) if self._would_decide(middle) else (middle, enough)
        return enough

    def add(self, incumbent_score: float, candidate_score: float) -> Verdict:
        """Take the rewards of both sides for the next task; TrainingError once there is a verdict."""
        if self._verdict != "undecided":
            raise TrainingError(
                f"The comparison is over ('{self._verdict}' after {self.pairs} pairs); begin another for new pairs."
            )
        difference = self._checked(candidate_score) - self._checked(incumbent_score)
        self._differences.append(difference)
        self._squares += difference * difference
        self._logs = [log + growth for log, growth in zip(self._logs, self._growths(difference), strict=True)]
        self._verdict = self._judged()
        return self._verdict

    def with_all(self, pairs: Iterable[tuple[float, float]]) -> Self:
        """The same, after all of these pairs."""
        for pair in pairs:
            self.add(*pair)
        return self

    def __str__(self) -> str:
        return f"{self.verdict}: {self.estimate if self.pairs else 'no pairs'}"

    def _checked(self, score: float) -> float:
        low, high = self.reward_range
        if not low <= score <= high:
            raise ConfigurationError(
                f"A reward of {score} lies outside {low} to {high}, for which the comparison holds; set reward_range."
            )
        return score

    def _judged(self) -> Verdict:
        if self.pairs < self.min_pairs:
            return "undecided"
        if self.evidence >= 1 / self.alpha:
            return "better"
        if self.pairs == self.max_pairs or self._hoped_for_evidence() < 1 / self.alpha:
            return "not better"
        return "undecided"

    def _growths(self, difference: float) -> list[float]:
        """What a pair adds to the logarithm of the wealth of each bet."""
        return [self._growth(bet, difference) for bet in self._bets]

    def _growth(self, bet: float, difference: float) -> float:
        won = (self._span + difference) / (self._span + self.min_effect)
        return math.log(1 - bet + bet * won)

    def _would_decide(self, pairs: int) -> bool:
        """Whether one of the bets of a comparison of so many pairs like these would alone bring enough evidence.

        Its growth over many pairs is nearly normal, whatever that of one pair is like.
        """
        for bet in _bets(self.alpha, pairs):
            growths = [self._growth(bet, difference) for difference in self._differences]
            # In four cases of five the wealth does not fall further below its mean.
            unlucky = pairs * fmean(growths) - NormalDist().inv_cdf(0.8) * math.sqrt(pairs) * pstdev(growths)
            if unlucky >= math.log(BETS / self.alpha):
                return True
        return False

    def _hoped_for_evidence(self) -> float:
        """The wealth at the end of the budget, if the pairs to come are as good as what was seen allows.

        They are taken to be like those that came, with as many of them turned into wins as it takes. One win and one
        loss that were not seen keep a short row of equal pairs from looking certain.
        """
        n, left = self.pairs, self.max_pairs - self.pairs
        mean = sum(self._differences) / n
        variance = (self._squares + 2 * self._span**2) / (n + 2) - (mean * n / (n + 2)) ** 2
        # The true gain is not known, and few pairs may be lucky.
        # The mean of the pairs to come may lie so far above that of those so far before the comparison gives up.
        hope = NormalDist().inv_cdf(0.9995) * math.sqrt(variance / (n + 2) + variance / left)
        wins = min(1.0, hope / max(self._span - mean, hope))
        growths = [(1 - wins) * log / n + wins * win for log, win in zip(self._logs, self._wins, strict=True)]
        return _mean_of_logs([log + left * growth for log, growth in zip(self._logs, growths, strict=True)])

    def _lower_bound(self, differences: Sequence[float]) -> float:
        """The largest gain that the pairs refute: one at which a bet against it has `1 / alpha`."""
        low, high = -self._span, fmean(differences)
        for _ in range(50):
            middle = (low + high) / 2
            fair = max(self._span + middle, 1e-12 * self._span)
            logs = [
                sum(math.log(1 - bet + bet * (self._span + difference) / fair) for difference in differences)
                for bet in self._bets
            ]
            if _mean_of_logs(logs) >= 1 / self.alpha:
                low = middle
            else:
                high = middle
        return low


def _bets(alpha: float, max_pairs: int) -> list[float]:
    """Fractions to stake, from the least that can succeed within the budget; fixed before the first pair.

    A row of pairs with variance v shows a gain g within n pairs if `g² n > 2 v log(1 / alpha)`, and `g / v` is then the
    best stake. With v at most 1, no smaller one is of use.
    """
    least = min(LARGEST_BET / 2, math.sqrt(2 * math.log(1 / alpha) / max_pairs))
    ratio = (LARGEST_BET / least) ** (1 / (BETS - 1))
    return [least * ratio**number for number in range(BETS)]


def _mean_of_logs(logs: Sequence[float]) -> float:
    """The mean of the numbers with these logarithms; infinite where it is too large to say."""
    largest = max(logs)
    mean = largest + math.log(fmean(math.exp(log - largest) for log in logs))
    return math.exp(mean) if mean < 700.0 else math.inf  # which a float can hold


class Gate:
    """Hands out alphas to the comparisons of a run, so that the whole run is wrong at most as often as `alpha_total`.

    A run is wrong if it promotes any candidate that is no better. Alphas that were handed out are spent, whatever comes
    of it, but for those of candidates that were found better: they come back for the comparisons after them. What wrong
    candidates can have had until the first of them is promoted is then never more than `alpha_total` in sum.

    Args:
        alpha_total: How likely a run may promote a candidate that is no better.
        comparisons: How many there will be at most, which then share evenly; None hands each a tenth of what is left.
    """

    def __init__(self, alpha_total: float = 0.05, comparisons: int | None = None) -> None:
        if not 0 < alpha_total < 1:
            raise ConfigurationError(f"alpha_total must lie between 0 and 1; it is {alpha_total}.")
        if comparisons is not None and comparisons < 1:
            raise ConfigurationError(f"comparisons must be at least 1, or None; it is {comparisons}.")
        self.alpha_total = alpha_total
        self.comparisons = comparisons
        self.begun = 0
        """How many comparisons were handed out."""
        self.skipped = 0
        """How many planned ones did not take place."""
        self._left = alpha_total
        self._lent: list[PairedComparison] = []

    def compare(
        self,
        *,
        max_pairs: int = 200,
        min_pairs: int = 8,
        min_effect: float = 0.0,
        reward_range: tuple[float, float] = (0.0, 1.0),
    ) -> PairedComparison:
        """A comparison for the next candidate; several may be under way at once. TrainingError beyond `comparisons`."""
        self._check_plan()
        self._settle()
        # Where nobody said how many there will be, each gets a tenth of the alpha that is left.
        share = 0.1 if self.comparisons is None else 1 / (self.comparisons - self._used)
        alpha = self._left * share
        comparison = PairedComparison(
            alpha, max_pairs=max_pairs, min_pairs=min_pairs, min_effect=min_effect, reward_range=reward_range
        )
        self.begun += 1
        self._left -= alpha
        self._lent.append(comparison)
        return comparison

    def skip(self) -> None:
        """A planned comparison does not take place; those after it share what it would have had."""
        self._check_plan()
        self.skipped += 1

    @property
    def _used(self) -> int:
        return self.begun + self.skipped

    def _check_plan(self) -> None:
        if self.comparisons is not None and self._used >= self.comparisons:
            raise TrainingError(
                f"All {self.comparisons} comparisons were handed out; plan more of them in `comparisons`."
            )

    def _settle(self) -> None:
        """Take back what promotions did not use, and forget what is spent."""
        self._left += sum(lent.alpha for lent in self._lent if lent.verdict == "better")
        self._lent = [lent for lent in self._lent if lent.verdict == "undecided"]


def gain_summary(before: Sequence[float | None], after: Sequence[float | None], alpha: float = 0.05) -> JsonObject:
    """The gain of a training for the summary of its run, by the test that admits prompts; empty without pairs.

    Args:
        before: The reward of the base for each task; None for a rollout that failed and does not count.
        after: The reward of the result, for the same tasks in the same order.
        alpha: Less where the same training is measured in several ways.
    """
    both = zip(before, after, strict=True) if len(before) == len(after) else ()
    pairs = [(base, result) for base, result in both if base is not None and result is not None]
    if not pairs:
        return {}
    rewards = [reward for pair in pairs for reward in pair]
    reward_range = (min(0.0, *rewards), max(1.0, *rewards))
    comparison = PairedComparison(alpha, max_pairs=len(pairs), min_pairs=len(pairs), reward_range=reward_range)
    found = comparison.with_all(pairs).estimate
    return {
        "gain": {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n, "verdict": comparison.verdict}
    }


def measured_summary(
    before: Estimate | None,
    after: Estimate | None,
    base_rewards: Sequence[float | None] | None,
    rewards: Sequence[float | None] | None,
    alpha: float = 0.05,
) -> JsonObject:
    """Validation before and after training and the gain, for the summary of a run, without what was not measured."""
    measured = {"validation_before": summary_of(before), "validation_after": summary_of(after)}
    is_paired = after is not None and base_rewards is not None and rewards is not None
    gain = gain_summary(base_rewards or (), rewards or (), alpha) if is_paired else {}
    return {**{name: found for name, found in measured.items() if found is not None}, **gain}
