"""SQLite that survives a loss of power, beside what the disk itself needs.

With `durability="power"` every commit waits for the disk, so the store can be no faster than `fsync` allows; sixteen
workers share the commits. The disk is asked in the folder the databases lie in, before and after the store's runs.
"""

import os
import statistics
import time
from pathlib import Path

from children import Bench
from report import Figure, Outcome

NAME = "durability"
TITLE = '2. SQLite with durability="power", beside the disk'
ROUNDS = 3
APPEND_BYTES = 8192
APPENDS = 200
WORKERS = 16
SPANS = 10
COMMITS = {"span by span": SPANS + 2, "batch": 3}
"""Commits a worker waits for, one after the other, for a rollout: dequeue, spans, update_attempt."""


def measure(bench: Bench) -> Outcome:
    disk_ms = append_times_ms(bench.folder)
    power = (bench.ours, "store.py", "sqlite-power")
    cases = {"span by span": power, "batch": (*power, "--batch")}
    runs = bench.alternate(cases, 1 if bench.is_quick else ROUNDS)
    disk_ms += append_times_ms(bench.folder)
    figures = [
        Figure("fsync of 8 KiB, median", statistics.median(disk_ms), "ms", note=f"{len(disk_ms)} appends"),
        Figure("fsync of 8 KiB, p95", statistics.quantiles(disk_ms, n=20)[-1], "ms"),
    ]
    for name, of_case in runs.items():
        rate = max(run["run_rollouts_per_s"] for run in of_case)
        wait_ms = WORKERS / rate / COMMITS[name] * 1e3
        figures.append(Figure(f"sqlite power, {name}", rate, "rollouts/s"))
        figures.append(Figure("  wait for one commit", wait_ms, "ms", note=f"{COMMITS[name]} waits a rollout"))
    return Outcome(figures, {"fsync_ms": [round(taken, 3) for taken in disk_ms], **runs})


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
