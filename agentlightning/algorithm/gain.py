"""The gain of a training: its result against its base on the same tasks, by the paired test that admits prompts."""

from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.comparison import PairedComparison

__all__ = ["gain_summary"]


def gain_summary(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """The gain for the summary of a run, with its interval and the test's verdict; empty if there are no pairs.

    Args:
        before: The reward of the base for each task.
        after: The reward of the result, for the same tasks in the same order.
    """
    if not before or len(before) != len(after):
        return {}
    low, high = min(0.0, *before, *after), max(1.0, *before, *after)
    pairs = len(before)
    comparison = PairedComparison(max_pairs=pairs, min_pairs=pairs, reward_range=(low, high))
    for incumbent, candidate in zip(before, after, strict=True):
        comparison.add(incumbent, candidate)
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
