"""Whether the candidate is really better than the best prompt so far: both run on the same tasks until it is decided.

Rewards that one of them already has on a task are used again; those with which the candidate was chosen are not,
because they flatter it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.algorithm.comparison import PairedComparison, Verdict
from agentlightning.algorithm.intervals import Estimate

__all__ = ["Challenge", "challenged", "overall_gain"]

PAIRS_AT_ONCE: Final = 8
"""Rollouts of so many tasks are under way together; what is decided in their midst leaves the rest unused."""

Rewards = Callable[[Sequence[int]], Awaitable[Sequence[float]]]
"""Gives the rewards on the validation tasks with these numbers."""


@dataclass(frozen=True)
class Challenge:
    """How a candidate fared against the best prompt of its time."""

    round: int
    incumbent: str
    candidate: str
    verdict: Verdict
    gain: Estimate
    alpha: float
    """How likely a candidate without a gain would have been called better."""

    def __str__(self) -> str:
        return f"{self.candidate} against {self.incumbent}: {self.verdict}, gain {self.gain}"


async def challenged(
    comparison: PairedComparison, tasks: Sequence[int], incumbent: Rewards, candidate: Rewards
) -> PairedComparison:
    """Feed a comparison with pairs, in the order of the tasks, until it is over or there are no tasks left."""
    begin = 0
    while comparison.pairs_left and begin < len(tasks):
        chunk = tasks[begin : begin + min(PAIRS_AT_ONCE, comparison.pairs_left)]
        begin += len(chunk)
        before, after = await incumbent(chunk), await candidate(chunk)
        for pair in zip(before, after, strict=True):
            if comparison.pairs_left:
                comparison.add(*pair)
    return comparison


def overall_gain(
    pairs: Sequence[tuple[float, float]], *, planned: int, alpha: float, reward_range: tuple[float, float]
) -> Estimate | None:
    """The gain from the first of each pair to the second, with an interval that holds however many there are.

    Args:
        planned: How many there could have been. The interval must not be made for the number at which it was stopped.
    """
    if not pairs:
        return None
    comparison = PairedComparison(alpha, max_pairs=planned, min_pairs=planned, reward_range=reward_range)
    for before, after in pairs:
        comparison.add(before, after)
    return comparison.estimate
