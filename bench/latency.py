"""How long `dequeue_rollout` takes when 64 workers, each on a connection of its own, ask every 100 ms.

Measured at the client, around the await; half of the calls find work. The workers share two processes, because one
event loop that awaits them all would add its own queue. How late its workers woke for their calls says what such a
queue, and the machine, add still.
"""

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "latency"
TITLE = "8. dequeue_rollout with 64 workers that ask every 100 ms"
KINDS = ("memory", "sqlite")
SECONDS = 20
QUICK_SECONDS = 3
TARGET = Target("below", 20)


def measure(bench: Bench) -> Outcome:
    seconds = QUICK_SECONDS if bench.is_quick else SECONDS
    runs = {
        kind: bench.run(bench.ours, "dequeue_latency.py", kind, "--workers", "64", "--seconds", str(seconds))
        for kind in KINDS
    }
    return Outcome([figure for kind, run in runs.items() for figure in figures_of(kind, run)], runs)


def figures_of(kind: str, run: Figures) -> list[Figure]:
    taken, with_work, late = run["dequeue"], run["with_work"], run["late"]
    share = f"{run['calls']:,} calls, {run['calls_with_work'] / run['calls']:.0%} found work"
    slowest = f"with work {with_work['p99_ms']:.2f} ms; slowest of all {taken['max_ms']:.1f} ms"
    return [
        Figure(f"{kind}, p50", taken["p50_ms"], "ms", note=share),
        Figure(f"{kind}, p99", taken["p99_ms"], "ms", TARGET, slowest),
        Figure("  workers woke late, p99", late["p99_ms"], "ms", note=f"p50 {late['p50_ms']:.2f} ms, not in the above"),
    ]
