"""Many connections claim and finish rollouts as fast as they can; none may be lost, none claimed twice.

usage: many_clients.py KIND --clients 1000 --rollouts 20000

All clients are connected before the first rollout is claimed. What they say they claimed is held against what was
enqueued, and against what the store knows of every rollout afterwards. Prints one JSON line.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from crowd import Meet, clients_of, gathered, shares_of
from filling import ROLLOUTS_PER_BATCH, Filler, tell
from serving import Server, running
from store import build_server, close, package

KINDS = ("memory", "sqlite")
PROCESSES = 2
CONNECTING_SECONDS = 0.005
"""Between two clients of a process; also how long each waits in vain for the first time."""
PATIENCE_SECONDS = 2.0
"""A client that finds no work for so long is done."""
PAGE_SIZE = 1000


async def claim_and_finish(meet: Meet, url: str, numbers: range) -> dict[str, Any]:
    """What one process does: the claims of each client, the slowest of them, and when all was finished."""
    last = slowest = 0.0

    async def connect(client: Any, number: int) -> None:
        await client.dequeue_rollout(f"worker-{number}", wait=CONNECTING_SECONDS)

    async def work(client: Any, number: int) -> list[str]:
        nonlocal last, slowest
        claimed, began = [], time.time()
        while (claim := await client.dequeue_rollout(f"worker-{number}", wait=PATIENCE_SECONDS)) is not None:
            claimed.append(claim.rollout_id)
            await client.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
            last = time.time()
            slowest, began = max(slowest, last - began), last
        return claimed

    async with clients_of(url, len(numbers)) as clients:
        connecting = []
        for client, number in zip(clients, numbers, strict=True):
            connecting.append(asyncio.create_task(connect(client, number)))
            await asyncio.sleep(CONNECTING_SECONDS)
        await asyncio.gather(*connecting)
        await meet()
        await meet()  # between the two, the queue is filled
        claims = await asyncio.gather(*[work(client, n) for client, n in zip(clients, numbers, strict=True)])
    return {"claims": claims, "slowest": slowest, "last": last}


async def run_crowd(server: Server, store: Any, clients: int, rollouts: int) -> dict[str, Any]:
    filler = Filler(store)
    shares = [(server.url, numbers) for numbers in shares_of(clients, PROCESSES)]
    async with gathered(claim_and_finish, shares) as crowd:
        tell(f"connecting {clients} clients")
        await crowd.meet()
        batches = [min(ROLLOUTS_PER_BATCH, rollouts - done) for done in range(0, rollouts, ROLLOUTS_PER_BATCH)]
        wanted = [rollout_id for count in batches for rollout_id in await filler.enqueue(count)]
        tell(f"{clients} clients claim {rollouts} rollouts")
        await crowd.meet()
        began = time.time()
        results = await crowd.results()
    claims_by_client = [claims for result in results for claims in result["claims"]]
    times_claimed = Counter(claimed for claims in claims_by_client for claimed in claims)
    seconds = max(result["last"] for result in results) - began
    return {
        "seconds": round(seconds, 2),
        "rollouts_per_s": round(rollouts / seconds, 1),
        "lost": len(set(wanted) - set(times_claimed)),
        "twice": sum(times > 1 for times in times_claimed.values()),
        "idle_clients": sum(not claims for claims in claims_by_client),
        "slowest_seconds": round(max(result["slowest"] for result in results), 2),
        "most_of_one_client": max(map(len, claims_by_client)),
    }


async def all_rollouts(store: Any) -> AsyncIterator[Any]:
    offset, total = 0, 1
    while offset < total:
        page = await store.query_rollouts(sort_by="rollout_id", limit=PAGE_SIZE, offset=offset)
        for rollout in page:
            yield rollout
        offset, total = offset + len(page), page.total


async def look_at_store(store: Any) -> dict[str, Any]:
    """What the store knows of the rollouts."""
    statuses: Counter[str] = Counter()
    attempted_again = 0
    async for rollout in all_rollouts(store):
        statuses[rollout.status] += 1
        attempted_again += rollout.attempt.sequence_id != 1
    return {"statuses": dict(statuses), "attempted_again": attempted_again}


async def measure(kind: str, folder: str, clients: int, rollouts: int) -> dict[str, Any]:
    async with running(partial(build_server, kind, folder)) as server:
        store = package().LightningStoreClient(server.url)
        try:
            figures = await run_crowd(server, store, clients, rollouts)
            return {**figures, **await look_at_store(store)}
        finally:
            await close(store)


def main() -> None:
    parser = argparse.ArgumentParser(description="Have many clients share one queue.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=20_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(given.kind, folder, given.clients, given.rollouts))
    print(json.dumps({"version": package().__version__, **vars(given), **figures}))


if __name__ == "__main__":
    main()
