"""Intervals of means, held against published tables and against their own promise."""

import math
import random

import pytest

from agentlightning.algorithm.comparison import Estimate, estimate, student_quantile
from agentlightning.errors import ConfigurationError


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.95, 10, 1.8125), (0.995, 30, 2.7500), (0.975, 1000, 1.9623)],
)
def test_student_quantiles_are_those_of_the_tables(probability: float, degrees: int, quantile: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(quantile, abs=1e-4)


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (1, 100, 0.0018, 0.0545)],
)
def test_zeros_and_ones_get_wilsons_interval(wins: int, n: int, low: float, high: float) -> None:
    told = estimate([1.0] * wins + [0.0] * (n - wins))
    assert (told.mean, told.n) == (wins / n, n)
    assert [told.low, told.high] == pytest.approx([low, high], abs=1e-4)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        pytest.param([0.7] * 5, 0.374594, 0.839460, id="all the same"),
        pytest.param([0.5], 0.0, 1.0, id="one alone"),
        pytest.param([0.2, 0.4, 0.6, 0.8, 0.5], 0.207927, 0.792073, id="some that differ"),
        pytest.param([0.9] * 19 + [0.0], 0.701292, 0.944835, id="a rare one"),
    ],
)
def test_rewards_from_0_to_1_count_one_more_that_was_not_seen(values: list[float], low: float, high: float) -> None:
    told = estimate(values)
    assert [told.low, told.high] == pytest.approx([low, high], abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 5, 1000])
def test_rewards_that_are_all_the_same_prove_no_mean(value: float, n: int) -> None:
    told = estimate([value] * n)
    assert 0 <= told.low <= value <= told.high <= 1
    assert told.high - told.low > 1 / (n + 1)


def test_no_rewards_have_no_mean() -> None:
    with pytest.raises(ConfigurationError, match="no rewards"):
        estimate([])


@pytest.mark.parametrize("n", [3, 5, 20, 50])
@pytest.mark.parametrize(("less", "more"), [(0.0, 0.9), (0.05, 1.0), (0.3, 0.8)])
def test_intervals_of_two_rewards_hold_the_true_mean_however_rare_one_is(less: float, more: float, n: int) -> None:
    """Exactly: every outcome there can be is weighed with its chance."""
    told = [estimate([more] * number + [less] * (n - number)) for number in range(n + 1)]
    coverages = []
    for percent in range(1, 100):
        share = percent / 100
        mean = share * more + (1 - share) * less
        chances = [math.comb(n, number) * share**number * (1 - share) ** (n - number) for number in range(n + 1)]
        coverages.append(sum(chance for chance, one in zip(chances, told, strict=True) if one.low <= mean <= one.high))

    assert min(coverages) > 0.93
    assert sum(coverages) / len(coverages) > 0.95


def _drawn(rng: random.Random, kind: str) -> float:
    if kind == "0 or 1":
        return float(rng.random() < 0.3)
    if kind == "mostly the best":
        return 1.0 if rng.random() < 0.8 else rng.random()
    alpha, beta = {"around the mean": (3.0, 7.0), "mostly small": (0.2, 5.0), "close together": (50.0, 20.0)}[kind]
    return rng.betavariate(alpha, beta)


@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize(
    ("kind", "mean"),
    [
        ("0 or 1", 0.3),
        ("mostly the best", 0.9),
        ("around the mean", 0.3),
        ("mostly small", 0.2 / 5.2),
        ("close together", 5 / 7),
    ],
)
def test_intervals_hold_the_true_mean_at_least_about_as_often_as_they_say(kind: str, mean: float, n: int) -> None:
    rng = random.Random(f"{kind} {n}")
    told = [estimate([_drawn(rng, kind) for _ in range(n)]) for _ in range(300)]

    assert all(0 <= one.low <= one.mean <= one.high <= 1 for one in told)
    held = sum(one.low <= mean <= one.high for one in told)
    assert held / len(told) >= 0.93


def test_an_estimate_reads_as_mean_interval_and_count() -> None:
    assert str(Estimate(0.5, 0.25, 0.75, 12)) == "0.500 [0.250, 0.750] (n=12)"
