"""1,000 connections claim and finish 20,000 rollouts as fast as they can: none is lost, none is claimed twice.

The clients share two processes. What they claimed is held against what was enqueued, and against what the store says
of every rollout.
"""

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "load"
TITLE = "10. {clients:,} connections claim and finish {rollouts:,} rollouts"
KINDS = ("memory", "sqlite")
CLIENTS = 1000
QUICK_CLIENTS = 200
ROLLOUTS = 20_000
QUICK_ROLLOUTS = 2_000
NONE = Target("below", 1)


def sizes(bench: Bench) -> dict[str, int]:
    if bench.is_quick:
        return {"clients": QUICK_CLIENTS, "rollouts": QUICK_ROLLOUTS}
    return {"clients": CLIENTS, "rollouts": ROLLOUTS}


def measure(bench: Bench) -> Outcome:
    options = [text for name, size in sizes(bench).items() for text in (f"--{name}", str(size))]
    runs = {kind: bench.run(bench.ours, "many_clients.py", kind, *options) for kind in KINDS}
    return Outcome([figure for kind, run in runs.items() for figure in figures_of(kind, run)], runs)


def figures_of(kind: str, run: Figures) -> list[Figure]:
    unfinished = run["rollouts"] - run["statuses"].get("succeeded", 0)
    slowest = f"{run['seconds']:.1f} s; slowest to claim and finish {run['slowest_seconds']:.2f} s"
    spread = f"most of one client {run['most_of_one_client']}, clients without any {run['idle_clients']}"
    return [
        Figure(f"{kind}, lost", max(run["lost"], unfinished), "", NONE, f"{unfinished} unfinished by the store's word"),
        Figure(f"{kind}, claimed twice", max(run["twice"], run["attempted_again"]), "", NONE, spread),
        Figure(f"{kind}, rate", run["rollouts_per_s"], "rollouts/s", note=slowest),
    ]
