"""How sure a mean is: an interval that holds the true one with the stated confidence.

Rewards of zero and one get Wilson's interval, which stays sensible when all are the same; others get Student's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from agentlightning.errors import ConfigurationError

__all__ = ["Estimate", "estimate"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean, and where the true one may lie."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n})"


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent values; ConfigurationError if there are none."""
    if not values:
        raise ConfigurationError("There are no rewards, so there is no mean.")
    n, mean = len(values), fmean(values)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    if all(value in (0, 1) for value in values):
        middle = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half), n)
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    half = student_quantile(0.5 + confidence / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution, found by halving; exact to 1e-9."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if _student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
        if high - low < 1e-9 * max(1.0, high):
            break
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    x = degrees / (degrees + t * t)
    return 1 - 0.5 * _incomplete_beta(degrees / 2, 0.5, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, as a continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    fraction, c, d = 1.0, 1.0, 0.0
    for number in range(300):
        m = number // 2
        if number == 0:
            numerator = 1.0
        elif number % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + numerator * d or tiny)
        c = 1 + numerator / c or tiny
        fraction *= c * d
        if abs(1 - c * d) < 1e-14:
            break
    return front * (fraction - 1)
