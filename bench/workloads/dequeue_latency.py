"""How long a client waits for `dequeue_rollout` while many ask steadily. Prints one JSON line.

usage: dequeue_latency.py KIND --workers 64 --seconds 20

Every worker has a client with a connection of its own and asks once every 100 ms, the workers evenly spread over that
time; half of the calls find work, which the worker then finishes. The workers share two processes and a third feeds
the queue: a process that awaits all answers itself would add its own queue to what it measures. How late a worker woke
for its call is told as well, because that is the part of such a queue that is left.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from crowd import Meet, clients_of, gathered, shares_of
from filling import Filler, tell
from serving import running
from store import build_server, close, package

KINDS = ("memory", "sqlite")
PROCESSES = 2
PERIOD_SECONDS = 0.1
SHARE_WITH_WORK = 0.5
FEEDING_SECONDS = 0.025
TAIL_SECONDS = 2.0
"""How long the queue is fed beyond the time of the calls, so that the last ones find work as well."""


@dataclass(frozen=True)
class Asking:
    """How many ask for how long."""

    workers: int
    seconds: float
    warm_up: float
    """Seconds before those, not measured: a client makes its first calls by HTTP, then opens the live channel."""

    @property
    def ticks(self) -> int:
        """Calls of one worker."""
        return round((self.warm_up + self.seconds) / PERIOD_SECONDS)


Sample = tuple[float, float, bool]
"""Milliseconds a call took, milliseconds it began late, whether it found work."""


async def ask_steadily(client: Any, number: int, asking: Asking) -> list[Sample]:
    """One worker's calls; those of the warm-up are left out."""
    samples: list[Sample] = []
    begin = time.perf_counter() + number / asking.workers * PERIOD_SECONDS
    for tick in range(asking.ticks):
        due = begin + tick * PERIOD_SECONDS
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        asked = time.perf_counter()
        claim = await client.dequeue_rollout(f"worker-{number}")
        answered = time.perf_counter()
        if tick * PERIOD_SECONDS >= asking.warm_up:
            samples.append(((answered - asked) * 1e3, (asked - due) * 1e3, claim is not None))
        if claim is not None:
            await client.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
    return samples


async def be_workers(meet: Meet, url: str, numbers: range, asking: Asking) -> list[Sample]:
    """What one process does."""
    async with clients_of(url, len(numbers)) as clients:
        await meet()
        calling = [ask_steadily(client, number, asking) for client, number in zip(clients, numbers, strict=True)]
        return [sample for samples in await asyncio.gather(*calling) for sample in samples]


async def feed(url: str, asking: Asking) -> None:
    """Enqueue work for a share of the calls, a little at a time."""
    client = package().LightningStoreClient(url)
    filler = Filler(client)
    rate = asking.workers / PERIOD_SECONDS * SHARE_WITH_WORK
    try:
        began, fed = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < asking.warm_up + asking.seconds + TAIL_SECONDS:
            count = max(round(rate * elapsed) - fed, 1)
            await filler.enqueue(count)
            fed += count
            await asyncio.sleep(FEEDING_SECONDS)
    finally:
        await close(client)


def described(values: list[float]) -> dict[str, float]:
    return {
        "p50_ms": round(statistics.median(values), 3),
        "p99_ms": round(statistics.quantiles(values, n=100)[-1], 3),
        "max_ms": round(max(values), 3),
    }


async def measure(kind: str, folder: str, asking: Asking) -> dict[str, Any]:
    async with running(partial(build_server, kind, folder)) as server:
        shares = [(server.url, numbers, asking) for numbers in shares_of(asking.workers, PROCESSES)]
        async with gathered(be_workers, shares) as crowd:
            await crowd.meet()
            tell(f"{asking.workers} workers ask for {asking.warm_up + asking.seconds:g} s")
            feeding = asyncio.create_task(feed(server.url, asking))
            samples: list[Sample] = [sample for told in await crowd.results() for sample in told]
            feeding.cancel()
            with suppress(asyncio.CancelledError):
                await feeding
    return {
        "calls": len(samples),
        "calls_with_work": sum(has_work for _, _, has_work in samples),
        "dequeue": described([took for took, _, _ in samples]),
        "with_work": described([took for took, _, has_work in samples if has_work]),
        "late": described([late for _, late, _ in samples]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long dequeue_rollout takes.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before those, not measured")
    given = parser.parse_args()
    asking = Asking(given.workers, given.seconds, given.warm_up)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(given.kind, folder, asking))
    print(json.dumps({"version": package().__version__, **vars(given), **figures}))


if __name__ == "__main__":
    main()
