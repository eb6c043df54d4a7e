"""Store servers on one PostgreSQL database, killed and restarted under load: what was acknowledged must be there.

Workers claim rollouts through two servers, add spans and finish them, while the servers (`servers`) or the database
(`database`) are killed with SIGKILL, or stopped without a checkpoint, and started again, `--rounds` times. Afterwards
every acknowledged rollout, span and end is looked for, and no rollout may have been claimed twice. Exits with 1 if
something is missing. Run it as `python bench/faults.py servers` or `python bench/faults.py database`.
"""

import argparse
import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent / "workloads")]

from store import make_span  # noqa: E402

from agentlightning.errors import StoreUnavailable  # noqa: E402
from agentlightning.store import LightningStoreClient  # noqa: E402
from agentlightning.store.claims import Claim  # noqa: E402
from agentlightning.store.postgres import PostgresLightningStore  # noqa: E402
from agentlightning.store.postgres.database import described  # noqa: E402
from tests.postgres import PASSWORD, Cluster, free_port  # noqa: E402

WORKERS = 8
SPANS = 3
OUTAGE_SECONDS = 120.0
WAIT_SECONDS = 2.0
BETWEEN_SECONDS = 1.0
"""Of work between two faults."""


@dataclass
class Acknowledged:
    """What the store has answered for."""

    rollouts: set[str] = field(default_factory=set)
    claims: Counter[str] = field(default_factory=Counter)
    spans: set[tuple[str, str]] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)


class Server:
    """`agl store` on a port that it keeps."""

    def __init__(self, dsn: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "agentlightning.cli", "store", "--backend", "postgres"]
        self._command += ["--dsn", described(dsn), "--port", str(self.port), "--log-level", "ERROR"]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        self._process = subprocess.Popen(self._command, env=environment, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def produce(client: LightningStoreClient, seen: Acknowledged, stop: asyncio.Event) -> None:
    for number in itertools.count():
        if stop.is_set():
            return
        rollout = await client.enqueue_rollout({"n": number}, rollout_id=f"r-{number}")
        seen.rollouts.add(rollout.rollout_id)
        await asyncio.sleep(0.02)


async def claimed(client: LightningStoreClient, name: str, claim_id: str) -> Sequence[Claim]:
    """Claim a rollout, again under the same id until there is an answer."""
    while True:
        with suppress(StoreUnavailable):
            return await client.claim_rollouts(worker_id=name, wait=WAIT_SECONDS, claim_id=claim_id)
        await asyncio.sleep(0.1)


async def work(client: LightningStoreClient, name: str, seen: Acknowledged, stop: asyncio.Event) -> None:
    """Claim, add spans, finish, until the queue is empty after the end of the faults."""
    for number in itertools.count():
        claims = await claimed(client, name, f"0:{number}")
        if not claims and stop.is_set():
            return
        if not claims:
            continue
        claim = claims[0].rollout
        seen.claims[claim.rollout_id] += 1
        ids = (claim.rollout_id, claim.attempt.attempt_id)
        for number in range(1, SPANS + 1):
            span = make_span(*ids, number)
            await client.add_many_spans([span])
            seen.spans.add((claim.rollout_id, span.span_id))
        await client.update_attempt(*ids, status="succeeded")
        seen.finished.add(claim.rollout_id)


async def break_servers(servers: list[Server], cluster: Cluster, number: int) -> None:
    server = servers[number % len(servers)]
    server.kill()
    await asyncio.sleep(BETWEEN_SECONDS / 2)
    server.start()


async def break_database(servers: list[Server], cluster: Cluster, number: int) -> None:
    await asyncio.to_thread(cluster.kill)
    await asyncio.to_thread(cluster.start)


FAULTS = {"servers": break_servers, "database": break_database}


async def progress(seen: Acknowledged) -> None:
    """Wait until work goes on."""
    before = len(seen.finished)
    while len(seen.finished) <= before:  # noqa: ASYNC110 # no event of ours comes from the servers
        await asyncio.sleep(0.1)


async def run(what: str, rounds: int, servers: list[Server], cluster: Cluster) -> Acknowledged:
    seen, stop = Acknowledged(), asyncio.Event()
    clients = [LightningStoreClient(server.url, outage_seconds=OUTAGE_SECONDS) for server in servers]
    tasks = [asyncio.create_task(produce(clients[0], seen, stop))]
    tasks += [asyncio.create_task(work(clients[n % len(clients)], f"w-{n}", seen, stop)) for n in range(WORKERS)]
    await progress(seen)
    for number in range(rounds):
        await FAULTS[what](servers, cluster, number)
        await progress(seen)
        await asyncio.sleep(BETWEEN_SECONDS)
    stop.set()
    await asyncio.gather(*tasks)
    for client in clients:
        await client.close()
    return seen


async def losses(dsn: str, seen: Acknowledged) -> dict[str, int]:
    """How much of what was acknowledged is not there, and how much was claimed twice."""
    async with PostgresLightningStore(dsn) as store:
        rollouts: dict[str, Any] = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
        attempts = {key: len(await store.query_attempts(key)) for key in seen.claims}
        kept = {(key, span.span_id) for key in seen.claims for span in await store.query_spans(key)}
    return {
        "rollouts lost": len(seen.rollouts - rollouts.keys()),
        "spans lost": len(seen.spans - kept),
        "ends lost": sum(rollouts[key].status != "succeeded" for key in seen.finished),
        "claimed twice": sum(count > 1 for count in [*seen.claims.values(), *attempts.values()]),
        "never finished": len(seen.rollouts - seen.finished),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and restart store servers, or their database, under load.")
    parser.add_argument("what", choices=FAULTS)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="agl-faults-"))
    cluster = Cluster(folder / "cluster")
    cluster.create()
    cluster.start()
    servers: list[Server] = []
    began = time.monotonic()
    try:
        dsn = cluster.create_database("faults")
        servers = [Server(dsn) for _ in range(2)]
        seen = asyncio.run(run(given.what, given.rounds, servers, cluster))
        found = asyncio.run(losses(dsn, seen))
    finally:
        for server in servers:
            server.kill()
        with suppress(RuntimeError):
            cluster.kill()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{given.what} killed {given.rounds} times in {time.monotonic() - began:.0f} s")
    print(f"{len(seen.rollouts)} rollouts, {len(seen.spans)} spans, {len(seen.finished)} ends acknowledged")
    for name, count in found.items():
        print(f"{name:>16}: {count}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
