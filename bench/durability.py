"""SQLite that survives a loss of power, beside what the disk itself needs.

With `durability="power"` every commit waits for the disk, so the store can be no faster than `fsync` allows; sixteen
workers share the commits. A disk that others use can become twenty times slower from one minute to the next. It is
therefore asked right before every run, in the folder the databases lie in, and a run is shown with its own answer.
"""

import os
import statistics
import time
from pathlib import Path

from children import Bench, Figures
from report import Figure, Outcome

NAME = "durability"
TITLE = '2. SQLite with durability="power", beside the disk'
ROUNDS = 3
APPEND_BYTES = 8192
APPENDS = 200
WORKERS = 16
SPANS = 10
CASES: dict[str, tuple[str, ...]] = {"span by span": (), "batch": ("--batch",)}
COMMITS = {"span by span": SPANS + 2, "batch": 3}
"""Commits a worker waits for, one after the other, for a rollout: dequeue, spans, update_attempt."""


def measure(bench: Bench) -> Outcome:
    runs: dict[str, list[Figures]] = {name: [] for name in CASES}
    for _ in range(1 if bench.is_quick else ROUNDS):
        for name, arguments in CASES.items():
            disk = disk_figures(append_times_ms(bench.folder))
            run = bench.run(bench.ours, "store.py", "sqlite-power", *arguments)
            runs[name].append({**run, **disk})
    return Outcome([figure for name in runs for figure in figures_of(name, runs[name])], runs)


def figures_of(name: str, runs: list[Figures]) -> list[Figure]:
    """The best run, with the disk as it was then."""
    best = max(runs, key=lambda run: float(run["run_rollouts_per_s"]))
    rate = best["run_rollouts_per_s"]
    spread = ", ".join(f"{run['run_rollouts_per_s']:,.0f} at {run['fsync_p50_ms']:.2f} ms" for run in runs)
    return [
        Figure(name, rate, "rollouts/s", note=f"runs: {spread}"),
        Figure("  wait for one commit", WORKERS / rate / COMMITS[name] * 1e3, "ms", note=f"{COMMITS[name]} a rollout"),
        Figure("  fsync of 8 KiB then, median", best["fsync_p50_ms"], "ms", note=f"{APPENDS} appends"),
        Figure("  fsync of 8 KiB then, p95", best["fsync_p95_ms"], "ms"),
    ]


def disk_figures(taken_ms: list[float]) -> Figures:
    return {"fsync_p50_ms": statistics.median(taken_ms), "fsync_p95_ms": statistics.quantiles(taken_ms, n=20)[-1]}


def append_times_ms(folder: Path) -> list[float]:
    """How long the disk takes to keep 8 KiB at the end of a file, many times."""
    path = folder / "disk-probe"
    block = os.urandom(APPEND_BYTES)
    taken = []
    with path.open("wb", buffering=0) as file:
        for _ in range(APPENDS):
            began = time.perf_counter()
            file.write(block)
            os.fsync(file.fileno())
            taken.append((time.perf_counter() - began) * 1e3)
    path.unlink()
    return taken
