"""Spans to triplets, ours against the release, and how the time grows with the trace.

The release compares all spans with all others, so a trace that is long for it is the one both can be asked for; the
longer ones are ours alone.
"""

from collections.abc import Mapping, Sequence

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "adapter"
TITLE = "11. Spans to triplets"
ROUNDS = 3
COMPARED = 3_000
"""Spans of the trace that both read."""
SIZES = (10_000, 100_000)
"""Spans of the traces that only ours reads."""
LONGEST_SECONDS = Target("below", 2)
RATIO = Target("at least", 100)
GROWTH = Target("below", 3)
"""What a span may cost in the longest trace, against the shorter one; comparing all pairs would make it ten."""


def measure(bench: Bench) -> Outcome:
    ours = ("--repeats", "5" if bench.is_quick else "10")
    cases = {"ours": (bench.ours, "adapter.py", str(COMPARED), *map(str, SIZES), *ours)}
    if bench.baseline is not None:
        cases["release"] = (bench.baseline, "adapter.py", str(COMPARED), "--repeats", "1")
    return outcome_of(bench.alternate(cases, 1 if bench.is_quick else ROUNDS))


def outcome_of(runs: Mapping[str, Sequence[Figures]]) -> Outcome:
    compared = {who: best(runs, who, COMPARED) for who in runs}
    figures = [Figure(f"{COMPARED:,} spans, {who}", taken * 1e3, "ms") for who, taken in compared.items()]
    ratio = compared["release"] / compared["ours"] if "release" in compared else None
    figures.append(Figure(f"{COMPARED:,} spans, release / ours", ratio, "x", RATIO))
    shorter, longest = SIZES
    taken = {size: best(runs, "ours", size) for size in SIZES}
    figures.append(Figure(f"{shorter:,} spans, ours", taken[shorter] * 1e3, "ms"))
    figures.append(Figure(f"{longest:,} spans, ours", taken[longest], "s", LONGEST_SECONDS))
    growth = (taken[longest] / longest) / (taken[shorter] / shorter)
    costs = f"{taken[shorter] / shorter * 1e6:.1f} us a span, then {taken[longest] / longest * 1e6:.1f} us"
    figures.append(Figure(f"a span of {longest:,} / of {shorter:,}", growth, "x", GROWTH, costs))
    return Outcome(figures, runs)


def best(runs: Mapping[str, Sequence[Figures]], who: str, size: int) -> float:
    return float(min(run["seconds"][str(size)] for run in runs[who]))
