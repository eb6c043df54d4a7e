"""Rollouts a second through a store: ours in memory and in SQLite, against the release's memory store.

Sixteen workers each take a rollout, add ten spans one by one (or all with one call, "batch") and finish it. The runs of
all stores take turns, and the best run of each counts.
"""

from collections.abc import Mapping, Sequence

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "throughput"
TITLE = "1. Rollouts a second (16 workers, 10 spans each, 500 rollouts; long: 2,000)"
LONG = ("--rollouts", "2000")
"""Long enough for several full garbage collections. A short run may meet one or none of them, by chance, and on either
side one costs a tenth of the run or more: of the short ratio and the long one, neither is the whole truth."""
ROUNDS = 3
MEMORY_TARGET = Target("at least", 15)
SQLITE_TARGET = Target("at least", 10)
RATE = "run_rollouts_per_s"
RELEASE = "release memory"
RELEASE_BATCH = "release memory, batch"
RELEASE_LONG = "release memory, long"


def measure(bench: Bench) -> Outcome:
    store = (bench.ours, "store.py")
    cases = {
        "memory": (*store, "memory"),
        "sqlite": (*store, "sqlite"),
        "memory, batch": (*store, "memory", "--batch"),
        "sqlite, batch": (*store, "sqlite", "--batch"),
        "memory, long": (*store, "memory", *LONG),
        "sqlite, long": (*store, "sqlite", *LONG),
    }
    if bench.baseline is not None:
        released = (bench.baseline, "store.py", "memory")
        cases = {RELEASE: released, RELEASE_BATCH: (*released, "--batch"), RELEASE_LONG: (*released, *LONG), **cases}
    runs = bench.alternate(cases, 1 if bench.is_quick else ROUNDS)
    return Outcome([*rates(runs), *ratios(runs)], runs)


def rates(runs: Mapping[str, Sequence[Figures]]) -> list[Figure]:
    figures = []
    for name, of_case in runs.items():
        found = sorted(run[RATE] for run in of_case)
        spread = f"runs: {', '.join(f'{rate:,.0f}' for rate in found)}"
        figures.append(Figure(name, found[-1], "rollouts/s", note=spread))
    return figures


def ratios(runs: Mapping[str, Sequence[Figures]]) -> list[Figure]:
    """The release has no SQLite store, so both of ours are held against its memory store."""
    return [
        Figure("memory / release", ratio(runs, "memory", RELEASE), "x", MEMORY_TARGET, "aim: 25x"),
        Figure("sqlite / release memory", ratio(runs, "sqlite", RELEASE), "x", SQLITE_TARGET),
        Figure("memory, batch / release", ratio(runs, "memory, batch", RELEASE), "x", note="the release span by span"),
        Figure("sqlite, batch / release", ratio(runs, "sqlite, batch", RELEASE), "x", note="the release span by span"),
        Figure("memory, batch / release, batch", ratio(runs, "memory, batch", RELEASE_BATCH), "x"),
        Figure("sqlite, batch / release, batch", ratio(runs, "sqlite, batch", RELEASE_BATCH), "x"),
        Figure("memory, long / release, long", ratio(runs, "memory, long", RELEASE_LONG), "x"),
        Figure("sqlite, long / release, long", ratio(runs, "sqlite, long", RELEASE_LONG), "x"),
    ]


def ratio(runs: Mapping[str, Sequence[Figures]], name: str, other: str) -> float | None:
    """Best against best; None without the release."""
    if other not in runs:
        return None
    return float(max(run[RATE] for run in runs[name]) / max(run[RATE] for run in runs[other]))
