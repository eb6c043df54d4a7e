"""Whether servers keep their size under steady work. Prints one JSON line.

usage: soaking.py --minutes 10

A server with a memory store and one with a SQLite store work at the same time. Each is sent 200 batches of ten spans a
second by sixteen clients, and up to five further connections a second come and go. A rollout of the SQLite store has
one batch. The rollouts of the memory store are few and large, because it keeps rollouts and the ids of their spans for
ever by design, and evicts the spans only. How much that is for a rollout is found out beforehand, by a store without a
server.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from crowd import Meet, clients_of, gathered
from filling import Filler, tell
from serving import Server, running
from store import build_server, make_span, package, spans_of
from usage import cpu_seconds, rss_mb

CLIENTS = 16
BATCHES_PER_SECOND = 200.0
SPANS_PER_BATCH = 10
BATCHES_PER_ROLLOUT = {"memory": 50, "sqlite": 1}
EVICTION_BYTES = 128_000_000
PASSING_SECONDS = 0.2
"""Between two connections that come, ask once and go."""
FIRST_SECONDS = 60.0
"""When memory is looked at for the first time; half-way through a run that is shorter than twice that."""
SAMPLE_SECONDS = 1.0
SAMPLES_PER_LOOK = 5
"""The median of so many samples counts, for memory is given back in steps."""
TOLD_SAMPLES = 60
SPAN_BYTES = 20_000
"""About what the memory store finds for a span when it weighs it exactly, which takes a while."""
MINUTE = 60.0


@dataclass
class Soak:
    """What is done to one server, and what was seen of it."""

    kind: str
    server: Server
    ends: float
    """By the monotonic clock, as everything here."""
    batches: int = 0
    rollouts: int = 0
    passed_connections: int = 0
    samples: list[tuple[float, float, int]] = field(default_factory=list)
    """When, memory in MB, rollouts done until then."""

    def is_over(self) -> bool:
        return time.monotonic() >= self.ends


def build(kind: str, folder: str, port: int) -> Any:
    if kind == "sqlite":
        return build_server(kind, folder, port)
    store = package().InMemoryLightningStore(eviction_memory_threshold=EVICTION_BYTES)
    return package().LightningStoreServer(store, "127.0.0.1", port)


async def fill_alone(meet: Meet, rollouts: int) -> float:
    """How many MB a memory store keeps of a rollout whose spans are evicted.

    As many rollouts again go before, so that everything of bounded size, such as the log of notices, is full.
    """
    store = package().InMemoryLightningStore(
        eviction_memory_threshold=EVICTION_BYTES, span_size_estimator=lambda span: SPAN_BYTES
    )
    filler = Filler(store)

    async def fill() -> float:
        for _ in range(rollouts):
            await filler.enqueue(1)
            claim = await store.dequeue_rollout()
            await store.add_many_spans(filler.spans_of(claim, BATCHES_PER_ROLLOUT["memory"] * SPANS_PER_BATCH))
            await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
        return rss_mb(os.getpid())

    before = await fill()
    return (await fill() - before) / rollouts


async def work(soak: Soak, client: Any, number: int) -> None:
    """One client's rollouts, its batches at equal distances in time; one that is late is not left out."""
    numbers, template = itertools.count(number, CLIENTS), make_span("r", "a", 1)
    distance = CLIENTS / BATCHES_PER_SECOND
    due = time.monotonic() + number / BATCHES_PER_SECOND
    while not soak.is_over():
        await client.enqueue_rollout(input={"q": number}, mode="train")
        claim = await client.dequeue_rollout()
        spans = spans_of(template, claim, BATCHES_PER_ROLLOUT[soak.kind] * SPANS_PER_BATCH, numbers)
        for batch in batches_of(spans):
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            due += distance
            if soak.is_over():
                return
            await client.add_many_spans(batch)
            soak.batches += 1
        await client.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
        soak.rollouts += 1


def batches_of(spans: list[Any]) -> Iterator[list[Any]]:
    for first in range(0, len(spans), SPANS_PER_BATCH):
        yield spans[first : first + SPANS_PER_BATCH]


async def pass_by(soak: Soak) -> None:
    """Clients that come, ask once over the live channel, and go."""
    while not soak.is_over():
        async with package().LightningStoreClient(soak.server.url, transport="ws") as client:
            await client.query_rollouts(limit=1)
        soak.passed_connections += 1
        await asyncio.sleep(PASSING_SECONDS)


async def watch(soak: Soak) -> None:
    began = time.monotonic()
    while True:
        memory = rss_mb(soak.server.pid)
        soak.samples.append((time.monotonic() - began, memory, soak.rollouts))
        if soak.kind == "sqlite" and len(soak.samples) % 10 == 0:
            tell(f"{time.monotonic() - began:.0f} s, sqlite {memory:.0f} MB")
        await asyncio.sleep(SAMPLE_SECONDS)


async def soak_server(kind: str, folder: str, seconds: float) -> dict[str, Any]:
    async with running(partial(build, kind, folder)) as server, clients_of(server.url, CLIENTS) as clients:
        soak = Soak(kind, server, time.monotonic() + seconds)
        used = cpu_seconds(server.pid)
        watching = asyncio.create_task(watch(soak))
        await asyncio.gather(pass_by(soak), *[work(soak, client, number) for number, client in enumerate(clients)])
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        used = cpu_seconds(server.pid) - used
        known = await clients[0].statistics()
    return {
        **memory_figures(soak.samples, seconds),
        "batches_per_s": round(soak.batches / seconds, 1),
        "rollouts": soak.rollouts,
        "passed_connections": soak.passed_connections,
        "server_cpu_percent": round(used / seconds * 100, 1),
        "span_mb": round(known["total_span_bytes"] / 1e6, 1),
        "file_mb": round(folder_mb(folder), 1),
    }


def folder_mb(folder: str) -> float:
    return sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6


def memory_figures(samples: list[tuple[float, float, int]], seconds: float) -> dict[str, Any]:
    """The first look at memory and the last, and what came in between."""
    first = min(FIRST_SECONDS, seconds / 2)
    before = [sample for sample in samples if sample[0] <= first][-SAMPLES_PER_LOOK:]
    latest = samples[-SAMPLES_PER_LOOK:]
    return {
        "first_seconds": first,
        "first_rss_mb": round(statistics.median(memory for _, memory, _ in before), 1),
        "last_rss_mb": round(statistics.median(memory for _, memory, _ in latest), 1),
        "rollouts_since_first": latest[-1][2] - before[-1][2],
        "rss_mb": [round(memory, 1) for _, memory, _ in samples[:: max(len(samples) // TOLD_SAMPLES, 1)]],
    }


async def measure(seconds: float, rollouts_alone: int) -> dict[str, Any]:
    tell("a memory store alone")
    async with gathered(fill_alone, [(rollouts_alone,)]) as crowd:
        (kept_mb,) = await crowd.results()
    with tempfile.TemporaryDirectory() as memory, tempfile.TemporaryDirectory() as sqlite:
        folders = {"memory": memory, "sqlite": sqlite}
        found = await asyncio.gather(*[soak_server(kind, folder, seconds) for kind, folder in folders.items()])
        return {"kept_kb_per_rollout": round(kept_mb * 1e3, 2), **dict(zip(folders, found, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch the memory of store servers under steady work.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--alone", type=int, default=300, metavar="ROLLOUTS", help="of the memory store without a server"
    )
    given = parser.parse_args()
    figures = asyncio.run(measure(given.minutes * MINUTE, given.alone))
    print(json.dumps({"version": package().__version__, **vars(given), **figures}))


if __name__ == "__main__":
    main()
