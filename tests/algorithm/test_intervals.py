"""Intervals of means, held against published tables and against their own promise."""

import math
import random

import pytest

from agentlightning.algorithm.intervals import Estimate, estimate, student_quantile
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


def test_other_rewards_get_students_interval() -> None:
    told = estimate([0.2, 0.4, 0.6, 0.8, 0.5])

    half = 2.7764 * math.sqrt(0.05) / math.sqrt(5)
    assert told.mean == pytest.approx(0.5)
    assert told.high - told.mean == told.mean - told.low == pytest.approx(half, abs=1e-4)


def test_more_confidence_is_a_wider_interval() -> None:
    values = [0.1, 0.5, 0.7, 0.9]

    assert estimate(values, 0.99).low < estimate(values, 0.95).low < estimate(values, 0.8).low


def test_a_single_reward_says_nothing_about_the_mean() -> None:
    assert estimate([0.5]) == Estimate(0.5, -math.inf, math.inf, 1)


def test_no_rewards_have_no_mean() -> None:
    with pytest.raises(ConfigurationError, match="no rewards"):
        estimate([])


@pytest.mark.parametrize("kind", ["0 or 1", "beta"])
def test_intervals_hold_the_true_mean_about_as_often_as_they_say(kind: str) -> None:
    rng = random.Random(kind)
    held = 0
    for _ in range(400):
        values = [float(rng.random() < 0.3) if kind == "0 or 1" else rng.betavariate(3, 7) for _ in range(40)]
        told = estimate(values)
        held += told.low <= 0.3 <= told.high

    assert 0.92 <= held / 400 <= 0.98


def test_an_estimate_reads_as_mean_interval_and_count() -> None:
    assert str(Estimate(0.5, 0.25, 0.75, 12)) == "0.500 [0.250, 0.750] (n=12)"
