"""How much more one side costs than another, from turns in which both did the same work."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_TURNS = 2
# Student's t for 95 %, by degrees of freedom from 1; beyond the table it falls to the normal one's 1.96.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class PairedRatio:
    """A ratio of costs with its 95 % interval."""

    ratio: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], reference: Sequence[float]) -> PairedRatio:
    """The geometric mean of the ratios of all turns; its interval is Student's, of the logarithms."""
    if len(ours) < FEWEST_TURNS:
        raise ValueError(f"{len(ours)} turns tell no interval; measure {FEWEST_TURNS} at least.")
    logarithms = [math.log(mine / other) for mine, other in zip(ours, reference, strict=True)]
    mean = statistics.fmean(logarithms)
    error = statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    half = _STUDENT[min(len(logarithms) - 1, len(_STUDENT)) - 1] * error
    return PairedRatio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
