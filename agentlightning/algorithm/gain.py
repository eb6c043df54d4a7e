"""The gain of a training: its result against its base on the same tasks, by the paired test that admits prompts."""

from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.comparison import PairedComparison

__all__ = ["gain_summary"]


def gain_summary(before: Sequence[float | None], after: Sequence[float | None]) -> dict[str, Any]:
    """The gain for the summary of a run, with its interval and the test's verdict; empty if there are no pairs.

    Args:
        before: The reward of the base for each task; None for a rollout that failed and does not count.
        after: The reward of the result, for the same tasks in the same order.
    """
    if len(before) != len(after):
        return {}
    both = zip(before, after, strict=True)
    pairs = [(base, result) for base, result in both if base is not None and result is not None]
    if not pairs:
        return {}
    rewards = [reward for pair in pairs for reward in pair]
    reward_range = (min(0.0, *rewards), max(1.0, *rewards))
    comparison = PairedComparison(max_pairs=len(pairs), min_pairs=len(pairs), reward_range=reward_range)
    for base, result in pairs:
        comparison.add(base, result)
    found = comparison.estimate
    return {
        "gain": {
            "mean": found.mean,
            "low": found.low,
            "high": found.high,
            "n": found.n,
            "verdict": comparison.verdict,
        }
    }
