"""What 1,000 clients cost while they are blocked in `dequeue_rollout(wait=60)`, and whether each gets work in the end.

No client sends heartbeats; the pings that keep a connection alive go on, for they belong to it.
"""

from children import Bench, Figures
from report import Figure, Outcome, Target

NAME = "idle"
TITLE = "9. {clients:,} clients that wait for work"
KINDS = ("memory", "sqlite")
CLIENTS = 1000
QUICK_CLIENTS = 200
SECONDS = 30
QUICK_SECONDS = 3
TARGET = Target("below", 2)


def sizes(bench: Bench) -> dict[str, int]:
    return {"clients": QUICK_CLIENTS if bench.is_quick else CLIENTS}


def measure(bench: Bench) -> Outcome:
    seconds = QUICK_SECONDS if bench.is_quick else SECONDS
    options = ("--clients", str(sizes(bench)["clients"]), "--seconds", str(seconds))
    runs = {kind: bench.run(bench.ours, "waiting_clients.py", kind, *options) for kind in KINDS}
    return Outcome([figure for kind, run in runs.items() for figure in figures_of(kind, run)], runs)


def figures_of(kind: str, run: Figures) -> list[Figure]:
    clients = run["clients"]
    connected = f"all connected after {run['connected_seconds']:.1f} s"
    served = (
        f"{run['clients_with_none']} got none, {run['left_in_queue']} left; all within {run['all_served_ms']:.0f} ms"
    )
    return [
        Figure(f"{kind}, server, of one core", run["server_cpu_percent"], "%", TARGET, f"over {run['seconds']:g} s"),
        Figure(f"{kind}, clients, of one core", run["clients_cpu_percent"], "%", note=connected),
        Figure(f"{kind}, clients with one rollout", run["clients_with_one"], "", Target("at least", clients), served),
    ]
