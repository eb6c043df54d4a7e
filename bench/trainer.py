"""Rollouts a second through `Trainer.fit`, with an agent that does nothing: against the release, in turns."""

from collections.abc import Mapping, Sequence

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "trainer"
TITLE = "13. Rollouts a second through a trainer (200 rollouts; 4,000 in one process)"
ROUNDS = 3
RATE = "rollouts_per_s"
CONCURRENT = ("cs", "--runners", "1", "--rollouts", "4000")
"""So many that beginning and end count little: for 1,000, 64 agents in step need 16 rounds, the last not full."""


def measure(bench: Bench) -> Outcome:
    processes, threads = ("cs", "--runners", "8"), ("shm", "--runners", "1")
    cases = {
        "8 processes": (bench.ours, "trainer.py", *processes),
        "1 thread": (bench.ours, "trainer.py", *threads),
        "1 process": (bench.ours, "trainer.py", *CONCURRENT),
        "1 process, 64 at once, 50 ms each": (
            *(bench.ours, "trainer.py", *CONCURRENT),
            *("--sleep", "0.05", "--concurrency", "64"),
        ),
        "1 process, 64 at once, 25 to 75 ms each": (
            *(bench.ours, "trainer.py", *CONCURRENT),
            *("--sleep", "0.05", "--spread", "0.5", "--concurrency", "64"),
        ),
    }
    if bench.baseline is not None:
        cases["release, 8 processes"] = (bench.baseline, "trainer.py", *processes)
        cases["release, 1 thread"] = (bench.baseline, "trainer.py", *threads)
    runs = bench.alternate(cases, 1 if bench.is_quick else ROUNDS)
    return Outcome([*(rate(name, of_case) for name, of_case in runs.items()), *judged(runs)], runs)


def rate(name: str, runs: Sequence[Figures]) -> Figure:
    found = sorted(run[RATE] for run in runs)
    return Figure(name, found[-1], "rollouts/s", note=f"runs: {', '.join(f'{value:,.0f}' for value in found)}")


def judged(runs: Mapping[str, Sequence[Figures]]) -> list[Figure]:
    first = min(run["fit_to_first_done_s"] for run in runs["8 processes"])
    return [
        Figure(
            "8 processes / release", ratio(runs, "8 processes", "release, 8 processes"), "x", Target("at least", 10)
        ),
        Figure(
            "1 thread / release", ratio(runs, "1 thread", "release, 1 thread"), "x", Target("at least", 6), "aim: 10x"
        ),
        Figure(
            "64 at once / without waiting",
            ratio(runs, "1 process, 64 at once, 50 ms each", "1 process"),
            "x",
            Target("at least", 0.8),
            "all end in step, 20 times a second",
        ),
        Figure(
            "64 at once, not in step / without waiting",
            ratio(runs, "1 process, 64 at once, 25 to 75 ms each", "1 process"),
            "x",
        ),
        Figure("from fit to the first rollout, 8 processes", first, "s", Target("below", 1.5)),
    ]


def ratio(runs: Mapping[str, Sequence[Figures]], name: str, other: str) -> float | None:
    """Best against best; None without the release."""
    if other not in runs:
        return None
    return float(max(run[RATE] for run in runs[name]) / max(run[RATE] for run in runs[other]))
