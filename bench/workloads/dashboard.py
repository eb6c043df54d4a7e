"""The dashboard on a large store: what it reads, timed over HTTP, and its first paint. Prints one JSON line.

usage: dashboard.py --spans N [--store sqlite|memory|postgres]
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from filling import SPANS_PER_ROLLOUT, Filler, tell
from large_store import timed_ms
from store import package

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreServer, SqliteLightningStore
from agentlightning.types import EnqueueRolloutRequest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.dashboard.browser import chromium_path, open_page, running_browser  # found by the line above
from tests.postgres import Cluster, binaries  # as above

QUERIES = 20
SEARCHES = 3
PAGE = "sort_by=start_time&sort_order=desc&limit=50"
PAGES = {
    "the newest": PAGE,
    "the best": "sort_by=reward&sort_order=desc&limit=50",
    "by reward, status and mode": f"reward_min=0.4&reward_max=0.6&status_in=succeeded&mode_in=train&{PAGE}",
    "of a step": "run_id_in=run-1&step_in=7&limit=50",
    "by part of an error": f"error_contains=Timeout&{PAGE}",
    "of an agent": f"agent_in=agent-3&{PAGE}",
    "of a run, the worst": "run_id_in=run-1&sort_by=reward&sort_order=asc&limit=50",
    "deep in the list": f"{PAGE}&offset=50000",
    **{f"sorted by {name}": f"sort_by={name}&sort_order=desc&limit=50" for name in ("status", "run_id", "agent")},
    "sorted by error": "sort_by=error&sort_order=desc&limit=50",
}
SEARCH = f"input_contains=no+such+text&{PAGE}"
READY = {"overview": ("", "[data-count=succeeded]"), "rollouts": ("#/rollouts", "#page tbody tr")}
STEP_ROLLOUTS = 128
AGENTS = 7
FAILED = 50
"""One rollout of so many fails."""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


class RewardedFiller(Filler):
    """Rollouts of a run, in steps, by several agents; with a reward each, or an error."""

    def __init__(self, store: Any, spans: int) -> None:
        super().__init__(store)
        self._spans = spans

    async def enqueue(self, count: int) -> list[str]:
        begun = len(self.rollout_ids)
        requests = [
            EnqueueRolloutRequest(
                input={"question": f"What is {number} * {number}?", "agent": f"agent-{number % AGENTS}"},
                mode="train",
                metadata={"run_id": "run-1", "step": number // STEP_ROLLOUTS, "group": f"group-{number // 8}"},
            )
            for number in range(begun, begun + count)
        ]
        return [rollout.rollout_id for rollout in await self._store.enqueue_many_rollouts(requests)]

    def outcome_of(self, claim: Any) -> dict[str, Any]:
        if zlib.crc32(claim.rollout_id.encode()) % FAILED:
            return {"status": "succeeded"}
        return {"status": "failed", "metadata": {"error": {"type": "TimeoutError", "message": "no answer"}}}

    def spans_of(self, claim: Any, count: int = SPANS_PER_ROLLOUT) -> list[Any]:
        *others, last = super().spans_of(claim, self._spans)
        reward = {"agentlightning.reward.0.value": (last.sequence_id * 7919 + len(self.rollout_ids)) % 101 / 100}
        return [*others, last.model_copy(update={"name": "agentlightning.reward", "attributes": reward})]


async def timed_pages(session: aiohttp.ClientSession, endpoint: str, store: Any) -> dict[str, Any]:
    async def read(query: str) -> None:
        async with session.get(f"{endpoint}/v1/agl/rollouts?{query}") as response:
            response.raise_for_status()
            await response.read()

    pages = []
    for name, query in PAGES.items():
        tell(f"reading rollouts, {name}")
        pages.append({"name": name, **await timed_ms(lambda query=query: read(query), QUERIES)})
    tell("searching in tasks")
    search = await timed_ms(lambda: read(SEARCH), SEARCHES)
    searching = asyncio.create_task(read(SEARCH))
    slowest = 0.0
    while not searching.done():
        began = time.perf_counter()
        await store.enqueue_rollout("during a search")
        slowest = max(slowest, time.perf_counter() - began)
        await asyncio.sleep(0.001)  # a write to memory does not wait, and the search is answered in this loop
    await searching
    return {"pages": pages, "search": search, "write_ms": round(slowest * 1e3, 2)}


async def painted(endpoint: str, folder: Path) -> list[dict[str, Any]]:
    """When views showed something, and when they showed what they are for."""
    if chromium_path() is None:
        return []
    views = []
    with running_browser(folder) as devtools:
        for name, (path, content) in READY.items():
            tell(f"opening {name}")
            async with open_page(devtools) as page:
                seen = f"document.querySelector({json.dumps(content)}) ? performance.now() : 0"
                await page.goto(f"{endpoint}/dashboard{path}")
                await page.until(seen)
                views.append({"name": name, "content_ms": await page.ask(seen), "paint_ms": await page.ask(PAINT)})
    return views


@contextlib.contextmanager
def large_store(kind: str, folder: Path) -> Iterator[LightningStore]:
    if kind == "sqlite":
        yield SqliteLightningStore(folder / "store.db")
    elif kind == "memory":
        yield InMemoryLightningStore()
    else:
        from agentlightning.store.postgres import PostgresLightningStore

        cluster = Cluster(folder / "cluster")
        cluster.create()
        cluster.start()
        try:
            yield PostgresLightningStore(cluster.create_database("dashboard"))
        finally:
            cluster.kill()


async def measure(store: LightningStore, kind: str, folder: Path, spans: int) -> dict[str, Any]:
    """SQLite has all the spans and is looked at in a browser; of the others only the pages of rollouts are read."""
    server = LightningStoreServer(store, "127.0.0.1", 0, launch_mode="asyncio")
    try:
        await RewardedFiller(store, SPANS_PER_ROLLOUT if kind == "sqlite" else 1).fill_to(spans)
        await server.start()
        async with aiohttp.ClientSession() as session:
            figures = await timed_pages(session, server.endpoint, store)
        views = await painted(server.endpoint, folder / "chromium") if kind == "sqlite" else []
        return {**figures, "views": views}
    finally:
        await server.stop()
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the dashboard on a large store.")
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--store", choices=("sqlite", "memory", "postgres"), default="sqlite")
    given = parser.parse_args()
    figures: dict[str, Any] = {"pages": [], "views": []}
    if given.store != "postgres" or binaries() is not None:
        with tempfile.TemporaryDirectory() as folder, large_store(given.store, Path(folder)) as store:
            figures = asyncio.run(measure(store, given.store, Path(folder), given.spans))
    print(json.dumps({"version": package().__version__, "spans": given.spans, **figures}))


if __name__ == "__main__":
    main()
