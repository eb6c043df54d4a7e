"""Rollouts a second through a server in another process: ours with a memory and a SQLite store, and the release's.

The work is that of the throughput section, sent by sixteen workers that share one client. The release sends the spans
of `add_many_spans` one by one, so its "batch" is about as fast as its single calls; both ratios stand side by side. The
runs of all servers take turns, and the best run of each counts.
"""

from collections.abc import Mapping, Sequence

from children import Bench, Figures
from report import Figure, Outcome, Target
from throughput import LONG, ROUNDS, rates, ratio

NAME = "network"
TITLE = "7. Rollouts a second through a server (16 workers, 10 spans each, {rollouts} rollouts; long: 2,000)"
ROLLOUTS = 500
QUICK_ROLLOUTS = 100
"""The release takes about 15 s for 500."""
SINGLE_TARGET = Target("at least", 10)
BATCH_TARGET = Target("at least", 30)
SQLITE_TARGET = Target("at least", 0.7)
RELEASE = "release http"
RELEASE_BATCH = "release http, batch"
WAYS = ("", ", batch", ", long", ", batch, long")


def sizes(bench: Bench) -> dict[str, int]:
    return {"rollouts": QUICK_ROLLOUTS if bench.is_quick else ROLLOUTS}


def measure(bench: Bench) -> Outcome:
    short = ("--rollouts", str(sizes(bench)["rollouts"]))
    cases = {
        f"{kind}{way}": (bench.ours, "store.py", kind, *(LONG if "long" in way else short), *batch_option(way))
        for way in WAYS
        for kind in ("http", "http-sqlite")
    }
    if bench.baseline is not None:
        released = (bench.baseline, "store.py", "http", *short)
        cases = {RELEASE: released, RELEASE_BATCH: (*released, *batch_option(RELEASE_BATCH)), **cases}
    runs = bench.alternate(cases, 1 if bench.is_quick else ROUNDS)
    return Outcome([*rates(runs), *ratios(runs)], runs)


def batch_option(case: str) -> tuple[str, ...]:
    return ("--batch",) if "batch" in case else ()


def ratios(runs: Mapping[str, Sequence[Figures]]) -> list[Figure]:
    one_by_one = "the release sends spans one by one either way"
    against_release = [
        Figure("http / release", ratio(runs, "http", RELEASE), "x", SINGLE_TARGET),
        Figure("http, batch / release", ratio(runs, "http, batch", RELEASE), "x", BATCH_TARGET, "against single calls"),
        Figure("http, batch / release, batch", ratio(runs, "http, batch", RELEASE_BATCH), "x", note=one_by_one),
        Figure("http-sqlite / release", ratio(runs, "http-sqlite", RELEASE), "x"),
        Figure("http-sqlite, batch / release", ratio(runs, "http-sqlite, batch", RELEASE), "x"),
    ]
    return [*against_release, *[sqlite_share(runs, way) for way in WAYS]]


def sqlite_share(runs: Mapping[str, Sequence[Figures]], way: str) -> Figure:
    """Our server with SQLite, against our server with memory; long runs are there to be known."""
    target = None if "long" in way else SQLITE_TARGET
    return Figure(f"http-sqlite{way} / http{way}", ratio(runs, f"http-sqlite{way}", f"http{way}"), "x", target)
