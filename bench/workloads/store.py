"""Store throughput through the public API; run it with the interpreter that has the package to measure.

A rollout is: enqueue, dequeue, `--spans` spans, attempt succeeded. Afterwards all rollouts are waited for and the
spans of each are queried. Prints one JSON line. It uses nothing but the package and the standard library, so that any
release since 0.3.0 can be measured by the same file.
"""

import argparse
import asyncio
import importlib
import inspect
import itertools
import json
import logging
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving import running

KINDS = ("memory", "sqlite", "sqlite-power", "postgres", "http", "http-sqlite")
FINISH_SECONDS = 20.0
"""How long finished rollouts may take to be seen as finished."""
POLL_SECONDS = 0.05

PROMPT = "What is 2+2? " * 20
ANSWER = "4 " * 60
PROMPT_TOKENS = list(range(200))
ANSWER_TOKENS = list(range(60))


@dataclass(frozen=True)
class Load:
    """How much work there is, and how it is sent."""

    rollouts: int
    spans: int
    workers: int
    batch: bool = False


@dataclass(frozen=True)
class Moments:
    """When each part of the workload was over."""

    began: float
    enqueued: float
    ran: float
    queried: float


def package() -> Any:
    """The package under measurement, whose version is not known when this file is checked."""
    return importlib.import_module("agentlightning")


def make_span(rollout_id: str, attempt_id: str, sequence_id: int) -> Any:
    """A model call with its token ids: about two kilobytes of JSON."""
    types: Any = importlib.import_module("agentlightning.types")
    now = time.time()
    return types.Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        trace_id=f"{sequence_id:032x}",
        span_id=f"{sequence_id:016x}",
        parent_id=None,
        name="openai.chat.completion",
        status=types.TraceStatus(status_code="OK"),
        attributes={
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": PROMPT,
            "gen_ai.completion.0.content": ANSWER,
            "gen_ai.request.model": "m",
            "gen_ai.usage.prompt_tokens": 120,
            "prompt_token_ids": PROMPT_TOKENS,
            "response_token_ids": ANSWER_TOKENS,
        },
        events=[],
        links=[],
        start_time=now,
        end_time=now,
        context=None,
        parent=None,
        resource=types.OtelResource(attributes={}, schema_url=""),
    )


def spans_of(template: Any, claim: Any, count: int, numbers: "itertools.count[int]") -> list[Any]:
    """The spans of one claimed rollout, each under an id of its own."""
    attempt_id = claim.attempt.attempt_id
    return [
        template.model_copy(
            update={
                "rollout_id": claim.rollout_id,
                "attempt_id": attempt_id,
                "sequence_id": sequence_id,
                "span_id": f"{next(numbers):016x}",
            }
        )
        for sequence_id in range(1, count + 1)
    ]


async def enqueue_all(store: Any, load: Load) -> list[str]:
    """Enqueue every rollout, as many at once as there are workers."""
    slots = asyncio.Semaphore(load.workers)
    rollout_ids: list[str] = []

    async def enqueue(index: int) -> None:
        async with slots:
            rollout = await store.enqueue_rollout(input={"q": index}, mode="train")
            rollout_ids.append(rollout.rollout_id)

    await asyncio.gather(*[enqueue(index) for index in range(load.rollouts)])
    return rollout_ids


async def run_all(store: Any, load: Load) -> int:
    """Empty the queue with concurrent workers; returns how many rollouts they finished."""
    numbers, template = itertools.count(1), make_span("r", "a", 1)

    async def work() -> int:
        done = 0
        while (claim := await store.dequeue_rollout()) is not None:
            spans = spans_of(template, claim, load.spans, numbers)
            if load.batch:
                await store.add_many_spans(spans)
            else:
                for span in spans:
                    await store.add_span(span)
            await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
            done += 1
        return done

    return sum(await asyncio.gather(*[work() for _ in range(load.workers)]))


async def query_all(store: Any, rollout_ids: list[str]) -> int:
    """Wait for every rollout, then read the spans of each; returns how many spans there are."""
    finished: list[Any] = []
    deadline = time.perf_counter() + FINISH_SECONDS
    while len(finished) < len(rollout_ids) and time.perf_counter() < deadline:
        finished = await store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=POLL_SECONDS)
    expect("finished rollouts", len(finished), len(rollout_ids))
    return sum([len(await store.query_spans(rollout_id)) for rollout_id in rollout_ids])


def expect(what: str, found: int, wanted: int) -> None:
    """A speed counts only if the work was done."""
    if found != wanted:
        raise SystemExit(f"{what}: {found} instead of {wanted}; the figures would mean nothing.")


async def run_workload(store: Any, load: Load) -> dict[str, float]:
    """All parts, timed."""
    began = time.perf_counter()
    rollout_ids = await enqueue_all(store, load)
    enqueued = time.perf_counter()
    done = await run_all(store, load)
    ran = time.perf_counter()
    expect("rollouts run", done, load.rollouts)
    found = await query_all(store, rollout_ids)
    expect("spans found", found, load.rollouts * load.spans)
    return rates(load, Moments(began, enqueued, ran, time.perf_counter()))


def rates(load: Load, moments: Moments) -> dict[str, float]:
    running = moments.ran - moments.enqueued
    return {
        "enqueue_per_s": load.rollouts / (moments.enqueued - moments.began),
        "run_rollouts_per_s": load.rollouts / running,
        "spans_per_s": load.rollouts * load.spans / running,
        "query_rollouts_per_s": load.rollouts / (moments.queried - moments.ran),
        "end_to_end_rollouts_per_s": load.rollouts / (moments.queried - moments.began),
    }


def build_store(kind: str, folder: str) -> Any:
    """An empty store; a file goes into `folder`, a database is the one that AGL_BENCH_POSTGRES names."""
    if kind == "postgres":
        postgres: Any = importlib.import_module("agentlightning.store.postgres")
        return postgres.PostgresLightningStore(os.environ["AGL_BENCH_POSTGRES"])
    if "sqlite" not in kind:
        return package().InMemoryLightningStore()
    sqlite: Any = importlib.import_module("agentlightning.store.sqlite")
    options = {"durability": "power"} if kind.endswith("-power") else {}
    return sqlite.SqliteLightningStore(str(Path(folder) / "store.db"), **options)


def build_server(kind: str, folder: str, port: int) -> Any:
    return package().LightningStoreServer(build_store(kind, folder), "127.0.0.1", port)


async def close(store: Any) -> None:
    """Stores of older releases may have no `close`, or one that is not async."""
    closing = getattr(store, "close", None)
    if closing is not None:
        outcome = closing()
        if inspect.isawaitable(outcome):
            await outcome


async def measure(kind: str, load: Load, folder: str) -> dict[str, float]:
    if kind.startswith("http"):
        async with running(partial(build_server, kind, folder)) as server:
            client = package().LightningStoreClient(server.url)
            try:
                return await run_workload(client, load)
            finally:
                await close(client)
    store = build_store(kind, folder)
    try:
        return await run_workload(store, load)
    finally:
        await close(store)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the throughput of a store.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--spans", type=int, default=10)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--batch", action="store_true", help="send the spans of a rollout with one add_many_spans")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("AGENTOPS_API_KEY", "")
    load = Load(given.rollouts, given.spans, given.workers, given.batch)
    version = package().__version__
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(given.kind, load, folder))
    described = {"version": version, "kind": given.kind, **vars(load)}
    print(json.dumps({**described, **{name: round(figure, 1) for name, figure in figures.items()}}))


if __name__ == "__main__":
    main()
