"""Queries on a large SQLite store, and the memory of the process that filled and asked it. Prints one JSON line.

usage: large_store.py --spans N
"""

import argparse
import asyncio
import importlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from filling import SPANS_PER_ROLLOUT, Filler, peak_rss_mb, tell
from store import expect, package

SPAN_QUERIES = 300
PAGE_QUERIES = 40
PAGE_SIZE = 100
OFFSET_SHARES = (0.0, 0.01, 0.5, 0.99)
"""Where in the list of rollouts a page begins."""
QUEUED_ROLLOUTS = 1000
"""How many rollouts wait in the queue while the others are finished."""
SEED = 20_251_115


async def timed_ms(call: Callable[[], Awaitable[Any]], count: int) -> dict[str, float]:
    """Median and 95th percentile of so many calls, one after the other, in milliseconds."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        taken.append((time.perf_counter() - began) * 1e3)
    return {
        "p50_ms": round(statistics.median(taken), 3),
        "p95_ms": round(statistics.quantiles(taken, n=20)[-1], 3),
        "max_ms": round(max(taken), 3),
    }


async def ask(store: Any, filler: Filler) -> dict[str, Any]:
    """Time every kind of query."""
    chance = random.Random(SEED)

    async def spans_of_one() -> None:
        expect("spans", len(await store.query_spans(chance.choice(filler.rollout_ids))), SPANS_PER_ROLLOUT)

    async def queuing() -> None:
        expect("queued", len(await store.query_rollouts(status_in=["queuing"], limit=10)), 10)

    figures: dict[str, Any] = {}
    tell("querying spans")
    figures["query_spans"] = await timed_ms(spans_of_one, SPAN_QUERIES)
    tell("querying the queue")
    figures["queuing"] = await timed_ms(queuing, PAGE_QUERIES)
    figures["pages"] = [await time_page(store, int(share * len(filler.rollout_ids))) for share in OFFSET_SHARES]
    return figures


async def time_page(store: Any, offset: int) -> dict[str, float]:
    """A page of rollouts, the newest first."""

    async def page() -> None:
        found = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=PAGE_SIZE, offset=offset)
        expect("rollouts", len(found), PAGE_SIZE)

    tell(f"querying a page at offset {offset:,}")
    return {"offset": offset, **await timed_ms(page, PAGE_QUERIES)}


async def measure(path: Path, spans: int) -> dict[str, Any]:
    sqlite: Any = importlib.import_module("agentlightning.store.sqlite")
    store = sqlite.SqliteLightningStore(str(path))
    try:
        filler = Filler(store)
        began = time.perf_counter()
        await filler.fill_to(spans)
        await filler.enqueue(QUEUED_ROLLOUTS)
        filled = {"fill_seconds": round(time.perf_counter() - began, 1), "fill_peak_rss_mb": round(peak_rss_mb(), 1)}
        figures = await ask(store, filler)
    finally:
        await store.close()
    file_mb = sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6
    return {**filled, **figures, "peak_rss_mb": round(peak_rss_mb(), 1), "file_mb": round(file_mb, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure queries on a large store.")
    parser.add_argument("--spans", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder) / "store.db", given.spans))
    print(json.dumps({"version": package().__version__, "spans": given.spans, **figures}))


if __name__ == "__main__":
    main()
