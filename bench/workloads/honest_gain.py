"""How often a run promotes a candidate that is no better, and how many pairs a comparison saves.

usage: honest_gain.py [--runs N] [--comparisons N] [--pairs N] [--apo-runs N] [--seed N] [--json]

First table: the comparisons of optimisation runs in which no candidate is better than the incumbent, with rewards of
many kinds. A run is wrong if it promotes any of its candidates. Beside it stands the habit of promoting whoever has the
higher mean.

Second table: candidates with a true gain, against tests of a fixed size. "Known gain" is the smallest fixed test that
finds this gain as often, planned by somebody who knew it. "Planned" is one test for all rows, which finds a gain of
PLANNED_GAIN as often as the comparison does; its size is spent whatever the gain is.

Third table: whole runs of APO, from the seed to the published prompt, over a store in memory. Every candidate is as
good as the seed, and the rewards are noisy. "Higher mean" is APO with `alpha=None`, which promotes whoever has the
higher mean on all validation tasks, in a quarter as many runs. "Saved" is against a test of each challenger on all
tasks that did not choose it.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentlightning.algorithm.apo import OptimisationResult
from agentlightning.algorithm.comparison import Gate, PairedComparison, estimate
from tests.algorithm.prompts.world import Optimiser, optimised, rendered

ALPHA_TOTAL = 0.05
INCUMBENT_MEAN = 0.3
TRUE_GAINS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6)
PLANNED_GAIN = 0.2
APO_SETTINGS: dict[str, Any] = {"beam_width": 2, "branch_factor": 2, "beam_rounds": 4, "val_batch_size": 12}
APO_TASKS = 100
"""Validation tasks of a whole run."""
SKEWED_GRADES = ((0.0, 0.25, 0.5, 0.75, 1.0), (0.9, 0.04, 0.03, 0.02, 0.01))

Draw = Callable[[int], tuple[float, float]]
"""The rewards of incumbent and candidate on the task with this number."""
Scene = Callable[[random.Random], Draw]
"""Sets up a comparison."""


# ---------------------------------------------------------------------- rewards without a gain


def alike(sample: Callable[[random.Random], float]) -> Scene:
    """Both sides draw from one distribution."""
    return lambda rng: lambda task: (sample(rng), sample(rng))


def won(rng: random.Random, chance: float) -> float:
    return float(rng.random() < chance)


def grade(rng: random.Random) -> float:
    return rng.choices(*SKEWED_GRADES)[0]


def by_task(rng: random.Random) -> Draw:
    """Tasks are easy or hard, for both sides alike."""
    chances = [rng.betavariate(0.5, 0.5) for _ in range(1000)]
    return lambda task: (won(rng, chances[task]), won(rng, chances[task]))


def unlike_but_equal(rng: random.Random) -> Draw:
    """The candidate is better at one half of the tasks and worse at the other."""

    def draw(task: int) -> tuple[float, float]:
        shift = rng.choice((-0.4, 0.4))
        return won(rng, 0.5), won(rng, 0.5 + shift)

    return draw


def rarely_worse(rng: random.Random) -> Draw:
    """The candidate gains a little nearly always and loses much rarely: its mean is the same, its median is not."""
    return lambda task: (0.5, 0.0 if rng.random() < 1 / 11 else 0.55)


SCENES: dict[str, Scene] = {
    "0 or 1, mean 0.1": alike(lambda rng: won(rng, 0.1)),
    "0 or 1, mean 0.5": alike(lambda rng: won(rng, 0.5)),
    "0 or 1, mean 0.9": alike(lambda rng: won(rng, 0.9)),
    "beta(2, 5)": alike(lambda rng: rng.betavariate(2, 5)),
    "beta(0.2, 0.2)": alike(lambda rng: rng.betavariate(0.2, 0.2)),
    "five grades, nine tenths 0": alike(grade),
    "0 or 1, easy and hard tasks": by_task,
    "other tasks, same mean": unlike_but_equal,
    "rare large losses": rarely_worse,
}
KEPT = "0 or 1, the incumbent's kept"
"""One row of the incumbent's rewards for all comparisons of a run."""


@dataclass(frozen=True)
class FalsePromotions:
    """How runs without a better candidate ended."""

    rewards: str
    runs: int
    rate: float
    low: float
    high: float
    naive_rate: float
    pairs_per_comparison: float


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    runs: int
    comparisons: int
    pairs: int
    seed: int
    apo_runs: int = 0
    """Whole runs of APO for each kind of rewards."""


def keeping_the_incumbent(rng: random.Random) -> Scene:
    kept = [won(rng, 0.5) for _ in range(1000)]
    return lambda _: lambda task: (kept[task], won(rng, 0.5))


def run_is_wrong(scene: Scene, rng: random.Random, plan: Plan) -> tuple[bool, int]:
    """Whether a run promotes anything, and how many pairs it took."""
    gate = Gate(ALPHA_TOTAL, plan.comparisons)
    promoted, pairs = False, 0
    for _ in range(plan.comparisons):
        comparison, draw = gate.compare(max_pairs=plan.pairs), scene(rng)
        while comparison.pairs_left:
            comparison.add(*draw(comparison.pairs))
        promoted |= comparison.verdict == "better"
        pairs += comparison.pairs
    return promoted, pairs


def naive_run_is_wrong(scene: Scene, rng: random.Random, plan: Plan) -> bool:
    """Whether any candidate has the higher mean on all tasks."""
    for _ in range(plan.comparisons):
        draw = scene(rng)
        if fmean(candidate - incumbent for incumbent, candidate in map(draw, range(plan.pairs))) > 0:
            return True
    return False


def false_promotions(name: str, plan: Plan) -> FalsePromotions:
    rng = random.Random(f"{plan.seed} {name}")
    scenes = [keeping_the_incumbent(rng) if name == KEPT else SCENES[name] for _ in range(plan.runs)]
    ends = [run_is_wrong(scene, rng, plan) for scene in scenes]
    naive = fmean(naive_run_is_wrong(scene, rng, plan) for scene in scenes)
    rate = estimate([float(wrong) for wrong, _ in ends])
    pairs = sum(taken for _, taken in ends) / (plan.runs * plan.comparisons)
    return FalsePromotions(name, plan.runs, rate.mean, rate.low, rate.high, naive, pairs)


# ---------------------------------------------------------------------- candidates with a gain


@dataclass(frozen=True)
class Savings:
    """What the comparisons of candidates with one true gain took."""

    gain: float
    found: float
    pairs: float
    """Mean of what a comparison took."""
    known_gain_pairs: int | None
    planned_pairs: int
    planned_found: float


def deviation(gain: float) -> float:
    """Of the difference of two rewards of 0 or 1."""
    high = INCUMBENT_MEAN + gain
    return math.sqrt(INCUMBENT_MEAN * (1 - INCUMBENT_MEAN) + high * (1 - high))


def fixed_pairs(gain: float, power: float, alpha: float) -> int:
    """The size of a fixed one-sided test of the mean difference, by the usual formula."""
    normal = NormalDist()
    sure = min(max(power, 0.01), 0.999)
    return math.ceil(((normal.inv_cdf(1 - alpha) + normal.inv_cdf(sure)) * deviation(gain) / gain) ** 2)


def fixed_power(gain: float, pairs: int, alpha: float) -> float:
    normal = NormalDist()
    return normal.cdf(gain * math.sqrt(pairs) / deviation(gain) - normal.inv_cdf(1 - alpha))


def savings(plan: Plan) -> list[Savings]:
    alpha = ALPHA_TOTAL / plan.comparisons
    measured = {gain: measure(gain, alpha, plan) for gain in TRUE_GAINS}
    planned = fixed_pairs(PLANNED_GAIN, measured[PLANNED_GAIN][0], alpha)
    return [
        Savings(
            gain,
            found,
            pairs,
            fixed_pairs(gain, found, alpha) if gain else None,
            planned,
            fixed_power(gain, planned, alpha),
        )
        for gain, (found, pairs) in measured.items()
    ]


def measure(gain: float, alpha: float, plan: Plan) -> tuple[float, float]:
    """How often the gain is found, and the mean number of pairs."""
    rng = random.Random(f"{plan.seed} gain {gain}")
    ended = []
    for _ in range(plan.runs):
        comparison = PairedComparison(alpha, max_pairs=plan.pairs)
        while comparison.pairs_left:
            comparison.add(won(rng, INCUMBENT_MEAN), won(rng, INCUMBENT_MEAN + gain))
        ended.append(comparison)
    return fmean(each.verdict == "better" for each in ended), fmean(each.pairs for each in ended)


# ---------------------------------------------------------------------- whole runs of APO


@dataclass(frozen=True)
class WholeRuns:
    """How runs of APO ended in which every candidate is as good as the seed."""

    rewards: str
    runs: int
    rate: float
    low: float
    high: float
    naive_rate: float
    comparisons_per_run: float
    pairs_per_comparison: float
    saved: float
    """Share of the pairs that a test on all tasks would have taken that did not choose the challenger."""


REWARDS: dict[str, Callable[[random.Random, float], float]] = {
    "0 or 1, mean 0.5": lambda rng, ease: won(rng, 0.5),
    "0 or 1, easy and hard tasks": lambda rng, ease: won(rng, ease),
}


async def whole_run(name: str, seed: str, alpha: float | None) -> OptimisationResult:
    """One run, whose optimiser writes a new prompt each time, and whose agents do not care."""
    rng, numbers = random.Random(seed), itertools.count(1)
    eases = [rng.betavariate(0.5, 0.5) for _ in range(APO_TASKS)]
    client = Optimiser(edit=lambda prompt, word: f"{prompt} Hint {next(numbers)}.")
    asked: Counter[tuple[str, Any]] = Counter()

    def judge(prompts: dict[str, str], task: Any) -> float:
        asked[prompts["prompt"], task] += 1  # so that it does not matter which rollout runs first
        chance = random.Random(f"{seed} {prompts['prompt']} {task} {asked[prompts['prompt'], task]}")
        return REWARDS[name](chance, eases[task])

    apo = await optimised(
        client,
        judge=judge,
        tasks=APO_TASKS,
        alpha=alpha,
        search_seed=rng.getrandbits(32),
        **APO_SETTINGS,
    )
    result: OptimisationResult = apo.result
    return result


async def whole_runs(name: str, runs: int, seed: int) -> WholeRuns:
    ends = [await whole_run(name, f"{seed} {name} {number}", ALPHA_TOTAL) for number in range(runs)]
    naive = [await whole_run(name, f"{seed} {name} {number}", None) for number in range(math.ceil(runs / 4))]
    challenges = [challenge for end in ends for challenge in end.challenges]
    rate = estimate([float(end.is_improved) for end in ends])
    pairs = fmean(challenge.gain.n for challenge in challenges)
    return WholeRuns(
        name,
        runs,
        rate.mean,
        rate.low,
        rate.high,
        naive_rate=fmean(end.is_improved for end in naive),
        comparisons_per_run=len(challenges) / runs,
        pairs_per_comparison=pairs,
        saved=1 - pairs / (APO_TASKS - APO_SETTINGS["val_batch_size"]),
    )


def all_whole_runs(plan: Plan) -> list[WholeRuns]:
    with patch("agentlightning.algorithm.apo.apo.poml.poml", rendered):
        return [asyncio.run(whole_runs(name, plan.apo_runs, plan.seed)) for name in REWARDS if plan.apo_runs]


# ---------------------------------------------------------------------- telling


def print_tables(plan: Plan, promotions: Sequence[FalsePromotions], saved: Sequence[Savings]) -> None:
    print(f"{plan.runs} runs of {plan.comparisons} comparisons, at most {plan.pairs} pairs each, alpha {ALPHA_TOTAL}\n")
    print(f"{'rewards, no candidate is better':33}{'wrong runs':>11}  {'interval':16}{'higher mean':>11}{'pairs':>8}")
    for row in promotions:
        interval = f"[{row.low:.3f}, {row.high:.3f}]"
        naive, pairs = f"{row.naive_rate:.1%}", f"{row.pairs_per_comparison:.1f}"
        print(f"{row.rewards:33}{row.rate:>11.1%}  {interval:16}{naive:>11}{pairs:>8}")
    print(f"\n{'':20}{'comparison':>16}{'known gain':>20}{'planned for ' + str(PLANNED_GAIN):>28}")
    print(f"{'true gain':20}{'found':>8}{'pairs':>8}{'pairs':>10}{'saved':>10}{'found':>10}{'pairs':>8}{'saved':>10}")
    for gain in saved:
        known = gain.known_gain_pairs
        told = f"{'-':>10}{'-':>10}" if known is None else f"{known:>10}{1 - gain.pairs / known:>10.0%}"
        planned = f"{gain.planned_found:>10.1%}{gain.planned_pairs:>8}{1 - gain.pairs / gain.planned_pairs:>10.0%}"
        print(f"{gain.gain:<20}{gain.found:>8.1%}{gain.pairs:>8.1f}{told}{planned}")


def print_whole_runs(plan: Plan, whole: Sequence[WholeRuns]) -> None:
    print(f"\n{plan.apo_runs} runs of APO on {APO_TASKS} validation tasks, every candidate as good as the seed\n")
    taken = f"{'compared':>10}{'pairs':>8}{'saved':>8}"
    print(f"{'rewards':33}{'wrong runs':>11}  {'interval':16}{'higher mean':>11}{taken}")
    for row in whole:
        interval, naive = f"[{row.low:.3f}, {row.high:.3f}]", f"{row.naive_rate:.1%}"
        taken = f"{row.comparisons_per_run:>10.1f}{row.pairs_per_comparison:>8.1f}{row.saved:>8.0%}"
        print(f"{row.rewards:33}{row.rate:>11.1%}  {interval:16}{naive:>11}{taken}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--comparisons", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--apo-runs", type=int, default=400, help="whole runs of APO for each kind of rewards")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    options = parser.parse_args()
    plan = Plan(options.runs, options.comparisons, options.pairs, options.seed, options.apo_runs)
    promotions = [false_promotions(name, plan) for name in (*SCENES, KEPT)]
    saved, whole = savings(plan), all_whole_runs(plan)
    if options.json:
        tables = {"false_promotions": promotions, "savings": saved, "whole_runs": whole}
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in tables.items()}))
    else:
        print_tables(plan, promotions, saved)
        print_whole_runs(plan, whole)


if __name__ == "__main__":
    main()
