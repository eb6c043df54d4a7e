"""What clients cost that wait for work and get none. Prints one JSON line.

usage: waiting_clients.py KIND --clients 1000 --seconds 30

Each client has a connection of its own and is blocked in `dequeue_rollout(wait=60)`; none of them sends heartbeats, but
the connections are kept alive as always. The processor time of the server is taken over a while in which nothing
happens. Then as many rollouts are enqueued as there are clients, with one call, and every client should get one.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from crowd import Meet, clients_of, gathered
from filling import Filler, tell
from serving import Server, running
from store import build_server, close, package
from usage import cpu_seconds

KINDS = ("memory", "sqlite")
WAIT_SECONDS = 60.0
CONNECTING_SECONDS = 0.002
"""Between two clients; thousands of handshakes at once would be another benchmark."""
CONNECTED_SECONDS = 25.0
"""How long all clients may take to be connected; later, the first of them would have waited in vain."""
POLL_SECONDS = 0.2
SETTLING_SECONDS = 2.0
PERCENT = 100.0


async def wait_for_work(meet: Meet, url: str, count: int) -> dict[str, Any]:
    """What the clients' process does: which rollout each client got, and when the last one came."""

    async def wait(client: Any, number: int) -> tuple[str | None, float]:
        claim = await client.dequeue_rollout(f"worker-{number}", wait=WAIT_SECONDS)
        return None if claim is None else claim.rollout_id, time.time()

    await meet()
    async with clients_of(url, count) as clients:
        waiting = []
        for number, client in enumerate(clients):
            waiting.append(asyncio.create_task(wait(client, number)))
            await asyncio.sleep(CONNECTING_SECONDS)
        outcomes = await asyncio.gather(*waiting)
    return {"claimed": [claimed for claimed, _ in outcomes], "last": max(moment for _, moment in outcomes)}


async def until_connected(store: Any, count: int) -> float:
    """Wait until the server has seen every client ask for work; returns the seconds that took."""
    began = time.monotonic()
    while (await store.query_workers(limit=1)).total < count:
        if time.monotonic() - began > CONNECTED_SECONDS:
            raise SystemExit(f"{count} clients were not connected within {CONNECTED_SECONDS:g} s.")
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - began


async def cpu_percent(pids: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Processor time of some processes over a while, each in percent of one core."""
    began, before = time.monotonic(), {name: cpu_seconds(pid) for name, pid in pids.items()}
    await asyncio.sleep(seconds)
    passed = time.monotonic() - began
    return {name: (cpu_seconds(pid) - before[name]) / passed * PERCENT for name, pid in pids.items()}


async def observe(server: Server, store: Any, clients: int, seconds: float) -> dict[str, Any]:
    async with gathered(wait_for_work, [(server.url, clients)]) as crowd:
        await crowd.meet()
        connected_seconds = await until_connected(store, clients)
        await asyncio.sleep(SETTLING_SECONDS)
        tell(f"{clients} clients wait, watched for {seconds:g} s")
        used = await cpu_percent({"server": server.pid, "clients": crowd.pids[0]}, seconds)
        enqueued = time.time()
        wanted = await Filler(store).enqueue(clients)
        (found,) = await crowd.results()
    claims = found["claimed"]
    return {
        "connected_seconds": round(connected_seconds, 2),
        "server_cpu_percent": round(used["server"], 3),
        "clients_cpu_percent": round(used["clients"], 3),
        "clients_with_one": len(set(claims) & set(wanted)),
        "clients_with_none": claims.count(None),
        "left_in_queue": int(await store.dequeue_rollout() is not None),
        "all_served_ms": round((found["last"] - enqueued) * 1e3, 1),
    }


async def measure(kind: str, folder: str, clients: int, seconds: float) -> dict[str, Any]:
    async with running(partial(build_server, kind, folder)) as server:
        store = package().LightningStoreClient(server.url)
        try:
            return await observe(server, store, clients, seconds)
        finally:
            await close(store)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what waiting clients cost.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(given.kind, folder, given.clients, given.seconds))
    print(json.dumps({"version": package().__version__, **vars(given), **figures}))


if __name__ == "__main__":
    main()
