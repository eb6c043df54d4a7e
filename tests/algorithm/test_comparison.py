"""Paired comparisons: verdicts, their intervals, their budget, and how often whole runs are wrong."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithm.comparison import Gate, PairedComparison
from agentlightning.errors import ConfigurationError, TrainingError

WORKLOAD = Path(__file__).parents[2] / "bench" / "workloads" / "honest_gain.py"
Pairs = list[tuple[float, float]]

REWARDS = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1)
PAIRS = st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=40)


def judged(comparison: PairedComparison, pairs: Iterable[tuple[float, float]]) -> PairedComparison:
    """The comparison after as many of the pairs as it takes."""
    for incumbent, candidate in pairs:
        if not comparison.pairs_left:
            break
        comparison.add(incumbent, candidate)
    return comparison


def coins(seed: int, count: int, incumbent: float, candidate: float) -> Pairs:
    rng = random.Random(seed)
    return [(float(rng.random() < incumbent), float(rng.random() < candidate)) for _ in range(count)]


# ---------------------------------------------------------------------- verdicts


def test_candidate_that_always_wins_is_better_after_few_pairs() -> None:
    comparison = judged(PairedComparison(), [(0.0, 1.0)] * 200)
    assert comparison.verdict == "better"
    assert comparison.pairs == comparison.min_pairs == 8
    assert comparison.pairs_left == 0


def test_budget_below_the_fewest_pairs_can_only_end_in_not_better() -> None:
    comparison = PairedComparison(0.004, max_pairs=8)
    assert comparison.fewest_pairs > 8
    assert judged(comparison, [(0.0, 1.0)] * 8).verdict == "not better"


def test_clear_gain_is_found_among_noise_before_the_budget_ends() -> None:
    ended = [judged(PairedComparison(), coins(seed, 200, 0.3, 0.7)) for seed in range(40)]
    assert sum(comparison.verdict == "better" for comparison in ended) >= 38
    assert fmean(comparison.pairs for comparison in ended) < 50


def test_negative_effect_admits_a_candidate_that_is_not_much_worse() -> None:
    comparison = judged(PairedComparison(max_pairs=400, min_effect=-0.2), [(0.5, 0.5)] * 400)
    assert comparison.verdict == "better"
    assert comparison.estimate.low >= -0.2


def test_scores_of_another_range_are_scaled() -> None:
    plain = judged(PairedComparison(), coins(3, 200, 0.2, 0.7))
    scaled = judged(
        PairedComparison(reward_range=(-10, 10)), [(20 * a - 10, 20 * b - 10) for a, b in coins(3, 200, 0.2, 0.7)]
    )

    assert (scaled.verdict, scaled.pairs) == (plain.verdict, plain.pairs) == ("better", plain.pairs)
    assert scaled.estimate.low == pytest.approx(20 * plain.estimate.low)


# ---------------------------------------------------------------------- budget


@given(PAIRS, st.integers(1, 30), st.integers(1, 30))
def test_verdict_falls_once_and_within_the_budget(pairs: Pairs, max_pairs: int, min_pairs: int) -> None:
    comparison = PairedComparison(max_pairs=max_pairs, min_pairs=min_pairs)

    judged(comparison, pairs)

    assert comparison.pairs <= max_pairs
    assert (comparison.verdict == "undecided") == (comparison.pairs_left > 0)
    if comparison.verdict != "undecided":
        assert comparison.pairs >= min(min_pairs, max_pairs)


def test_pair_after_the_verdict_is_refused_and_changes_nothing() -> None:
    comparison = judged(PairedComparison(), [(0.0, 1.0)] * 200)
    before = comparison.estimate

    with pytest.raises(TrainingError, match=r"'better' after 8 pairs"):
        comparison.add(1.0, 0.0)

    assert comparison.estimate == before


def test_pairs_are_left_only_where_they_could_not_change_the_verdict() -> None:
    """A gain of a third on twenty tasks: whatever stops early would hardly have been found with all of them."""
    stopped_early = found_early = found = 0
    for seed in range(300):
        pairs = coins(seed, 20, 0.3, 0.65)
        early = judged(PairedComparison(0.05 / 3, max_pairs=20), pairs)
        whole = PairedComparison(0.05 / 3, max_pairs=20, min_pairs=20).with_all(pairs)
        stopped_early += early.verdict == "not better" and early.pairs < 20
        found_early += early.verdict == "better"
        found += whole.verdict == "better"

    assert stopped_early > 0
    assert found - found_early <= 3  # one in a hundred


@pytest.mark.parametrize(("incumbent", "candidate"), [(0.5, 0.75), (0.1, 0.6), (0.7, 0.95)])
def test_a_gain_is_found_in_four_cases_of_five_with_the_pairs_it_is_said_to_need(
    incumbent: float, candidate: float
) -> None:
    seen = PairedComparison(0.02, max_pairs=2000, min_pairs=2000)
    needed = seen.with_all(coins(1, 1999, incumbent, candidate)).pairs_needed
    assert needed is not None

    found = [
        judged(PairedComparison(0.02, max_pairs=needed), coins(n, needed, incumbent, candidate)) for n in range(99)
    ]

    assert sum(one.verdict == "better" for one in found) >= 0.8 * len(found)


@pytest.mark.parametrize("pairs", [[], [(0.5, 0.5)] * 8, [(1.0, 0.0)] * 8], ids=["none", "equal", "worse"])
def test_without_a_gain_no_number_of_pairs_is_said_to_be_enough(pairs: Pairs) -> None:
    assert judged(PairedComparison(), pairs).pairs_needed is None


# ---------------------------------------------------------------------- estimates


@given(PAIRS)
def test_interval_holds_the_mean_and_stays_in_the_range(pairs: Pairs) -> None:
    comparison = judged(PairedComparison(), pairs)

    told = comparison.estimate

    assert told.mean == pytest.approx(fmean(b - a for a, b in pairs[: told.n]))
    assert -1 <= told.low <= told.mean + 1e-9
    assert told.mean - 1e-9 <= told.high <= 1


def test_interval_misses_the_true_gain_no_more_often_than_it_says() -> None:
    misses = 0
    for seed in range(40):
        told = judged(PairedComparison(0.05), coins(seed, 200, 0.3, 0.5)).estimate
        misses += not told.low <= 0.2 <= told.high

    assert misses <= 4  # 2 alpha of 40, of which the method needs less


def test_estimate_needs_a_pair() -> None:
    comparison = PairedComparison()
    assert str(comparison) == "undecided: no pairs"
    with pytest.raises(ConfigurationError, match="no pairs yet"):
        _ = comparison.estimate


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("score", [1.01, -0.01, math.nan, math.inf])
def test_score_outside_the_range_is_refused(score: float) -> None:
    comparison = PairedComparison()

    with pytest.raises(ConfigurationError, match="set reward_range"):
        comparison.add(0.5, score)
    with pytest.raises(ConfigurationError, match="set reward_range"):
        comparison.add(score, 0.5)

    assert comparison.pairs == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1.0}, "alpha"),
        ({"max_pairs": 0}, "max_pairs"),
        ({"min_pairs": 0}, "min_pairs"),
        ({"min_effect": 1.0}, "min_effect"),
        ({"reward_range": (1.0, 0.0)}, "reward_range"),
        ({"reward_range": (0.0, math.inf)}, "reward_range"),
    ],
    ids=lambda value: str(value),
)
def test_impossible_comparison_is_refused(options: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        PairedComparison(**options)  # type: ignore[arg-type] # wrong on purpose


def test_gate_shares_alpha_evenly_among_planned_comparisons() -> None:
    gate = Gate(0.06, comparisons=3)

    alphas = [judged(gate.compare(), [(1.0, 0.0)] * 8).alpha for _ in range(3)]

    assert alphas == pytest.approx([0.02] * 3)
    with pytest.raises(TrainingError, match="All 3 comparisons"):
        gate.compare()


# ---------------------------------------------------------------------- gates


@pytest.mark.parametrize(("alpha", "comparisons"), [(0.0, None), (1.0, 3), (0.05, 0)])
def test_impossible_gate_is_refused(alpha: float, comparisons: int | None) -> None:
    with pytest.raises(ConfigurationError, match=r"alpha_total|comparisons"):
        Gate(alpha, comparisons)


def test_comparisons_that_do_not_take_place_leave_their_share_to_the_others() -> None:
    gate = Gate(0.06, comparisons=3)
    gate.skip()

    shares = [gate.compare().alpha, gate.compare().alpha]

    assert shares == pytest.approx([0.03, 0.03])
    assert (gate.begun, gate.skipped) == (2, 1)
    with pytest.raises(TrainingError, match="All 3 comparisons"):
        gate.skip()


@pytest.mark.slow
def test_runs_without_a_better_candidate_are_seldom_wrong_and_short() -> None:
    command = [sys.executable, str(WORKLOAD), "--runs", "8", "--pairs", "100", "--apo-runs", "2", "--json"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    runs = figures["false_promotions"]
    assert fmean(row["rate"] for row in runs) <= 0.05
    assert all(row["rate"] <= 0.125 for row in runs)  # 1 of 8
    assert all(row["naive_rate"] > 0.8 and row["pairs_per_comparison"] < 70 for row in runs)
    gains = {row["gain"]: row for row in figures["savings"]}
    assert gains[0.5]["found"] >= 0.95
    assert gains[0.5]["pairs"] < gains[0.5]["known_gain_pairs"]
    whole = figures["whole_runs"]
    assert fmean(row["rate"] for row in whole) == 0
    assert fmean(row["naive_rate"] for row in whole) >= 0.5
    assert all(row["saved"] > 0.5 for row in whole)
