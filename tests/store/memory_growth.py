"""Fills memory stores with things of many shapes, and prints by how much the process and the store's estimate grew.

A process of its own, so that nothing else of the tests' is in its memory, and for each shape a fork of it.
"""

import asyncio
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, OtelResource, Span, SpanContext, TraceStatus

COUNT = 3000
chance = random.Random(1)


def text(length: int) -> str:
    return "".join(chance.choices("abcdefgh ", k=length))


def token_ids(count: int) -> list[int]:
    return [chance.randrange(150_000) for _ in range(count)]


ATTRIBUTES: dict[str, Any] = {
    "native": lambda: {"gen_ai.prompt.0.content": text(100), "token_ids": token_ids(200)},
    "json": lambda: {"gen_ai.prompt.0.content": text(100), "token_ids": token_ids(200)},
    "sixty attributes": lambda: {f"attribute.{number}": text(8) for number in range(60)},
    "plain": lambda: {"text": text(20), "number": 7},
}
TASKS: dict[str, Any] = {
    "tasks": lambda: {"question": text(500), "options": [text(20) for _ in range(5)], "ids": token_ids(50)},
    "plain tasks": lambda: 7,
}


def make_span(rollout: AttemptedRollout, number: int, shape: str) -> Span:
    context = SpanContext(
        trace_id=f"{chance.getrandbits(128):032x}",
        span_id=f"{chance.getrandbits(64):016x}",
        is_remote=False,
        trace_state={},
    )
    span = Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=number,
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=f"{chance.getrandbits(64):016x}",
        name="openai.chat.completion",
        status=TraceStatus(status_code="OK"),
        attributes=ATTRIBUTES[shape](),
        events=[],
        links=[],
        start_time=time.time(),
        end_time=time.time(),
        context=context,
        parent=None,
        resource=OtelResource(attributes={"service.name": "x"}, schema_url=""),
    )
    return Span.model_validate_json(span.model_dump_json()) if shape == "json" else span


async def add(store: InMemoryLightningStore, shape: str, count: int) -> None:
    if shape in TASKS:
        for _ in range(count):
            await store.enqueue_rollout(TASKS[shape](), metadata={"note": text(30)})
        return
    rollouts = await store.query_rollouts()
    for number in range(count):
        await store.add_span(make_span(rollouts[number % len(rollouts)], number, shape))  # type: ignore[arg-type] # begun


async def sizes(store: InMemoryLightningStore, shape: str) -> tuple[int, int]:
    """Of the process, and as the store estimates it."""
    statistics = await store.statistics()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    estimate = statistics["total_rollout_bytes" if shape in TASKS else "total_span_bytes"]
    return pages * os.sysconf("SC_PAGE_SIZE"), estimate


async def measure(shape: str) -> None:
    store = InMemoryLightningStore()
    for number in range(COUNT // 10):
        await store.start_rollout(number)
    await add(store, shape, COUNT)  # what the first ones load, and memory that is free at the start, are not their own
    before = await sizes(store, shape)
    await add(store, shape, COUNT)
    after = await sizes(store, shape)
    print(json.dumps([shape, *(new - old for old, new in zip(before, after, strict=True))]), flush=True)


def main() -> None:
    for shape in (*ATTRIBUTES, *TASKS):
        child = os.fork()
        if child == 0:
            asyncio.run(measure(shape))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
