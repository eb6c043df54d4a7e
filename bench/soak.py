"""Whether servers keep their size under ten minutes of steady work; not part of a run unless it is asked for.

Memory at the end is held against memory after the first minute. A memory store keeps its rollouts and the ids of their
spans for ever by design; what that comes to is measured on a store without a server and taken off before it is judged.
"""

from children import CHILD_SECONDS, Bench, Figures
from report import Figure, Outcome, Target

NAME = "soak"
TITLE = "11. Memory of servers under {minutes:g} minutes of steady work"
MINUTES = 10.0
QUICK_MINUTES = 0.25
TARGET = Target("within", 0.1)
MINUTE = 60.0


def sizes(bench: Bench) -> dict[str, float]:
    return {"minutes": QUICK_MINUTES if bench.is_quick else bench.soak_minutes}


def measure(bench: Bench) -> Outcome:
    minutes = sizes(bench)["minutes"]
    seconds = minutes * MINUTE + CHILD_SECONDS
    run = bench.run(bench.ours, "soaking.py", "--minutes", str(minutes), seconds=seconds)
    target = None if bench.is_quick else TARGET  # seconds do not fill what is of bounded size
    figures = [
        *figures_of("sqlite", run["sqlite"]),
        end_to_first("sqlite", run["sqlite"], target),
        *figures_of("memory", run["memory"]),
        end_to_first("memory", run["memory"], None),
        end_less_kept(run["memory"], run["kept_kb_per_rollout"], target),
    ]
    return Outcome(figures, {"run": run})


def figures_of(kind: str, run: Figures) -> list[Figure]:
    held = f"{run['span_mb']:,.0f} MB of spans by the store's count, {run['file_mb']:,.0f} MB on disk"
    work = f"{run['rollouts']:,} rollouts, {run['passed_connections']:,} connections came and went"
    return [
        Figure(f"{kind}, batches of ten spans", run["batches_per_s"], "/s", note=work),
        Figure(f"{kind}, server, of one core", run["server_cpu_percent"], "%"),
        Figure(f"{kind}, RSS after {run['first_seconds']:g} s", run["first_rss_mb"], "MB"),
        Figure(f"{kind}, RSS at the end", run["last_rss_mb"], "MB", note=held),
    ]


def end_to_first(kind: str, run: Figures, target: Target | None) -> Figure:
    note = f"{run['rollouts_since_first']:,} rollouts in between"
    return Figure(f"{kind}, end / first", run["last_rss_mb"] / run["first_rss_mb"], "x", target, note)


def end_less_kept(run: Figures, kept_kb: float, target: Target | None) -> Figure:
    """The memory store's end, less what a store without a server would have kept of the rollouts in between."""
    kept_mb = run["rollouts_since_first"] * kept_kb / 1e3
    ratio = (run["last_rss_mb"] - kept_mb) / run["first_rss_mb"]
    note = f"{kept_mb:.1f} MB kept by design, {kept_kb:.1f} kB of a rollout with its span ids"
    return Figure("memory, end less kept / first", ratio, "x", target, note)
