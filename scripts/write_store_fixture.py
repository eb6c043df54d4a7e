"""Write a small store file with a bit of everything in every state, as the code at hand writes it.

`tests/store/fixtures/schema-1.db` was made by this script at schema version 1; a test opens a copy with the current
code. When a migration is added, run this with the next number and keep the older files: they must open for ever.

    python scripts/write_store_fixture.py tests/store/fixtures/schema-1.db
"""

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    Event,
    Link,
    OtelResource,
    PromptTemplate,
    RolloutConfig,
    Span,
    SpanContext,
    TraceStatus,
)

FIRST_MOMENT = 1_790_000_000.0


class Clock:
    """A clock that goes on by a second whenever it is looked at."""

    def __init__(self) -> None:
        self.now = FIRST_MOMENT

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


_numbers = itertools.count(1)


def span_of(rollout: AttemptedRollout, sequence_id: int, name: str, **changes: Any) -> Span:
    number = next(_numbers)
    context = SpanContext(trace_id=f"{7:032x}", span_id=f"{number:016x}", is_remote=False, trace_state={})
    fields: dict[str, Any] = {
        "rollout_id": rollout.rollout_id,
        "attempt_id": rollout.attempt.attempt_id,
        "sequence_id": sequence_id,
        "trace_id": context.trace_id,
        "span_id": context.span_id,
        "parent_id": None,
        "name": name,
        "status": TraceStatus(status_code="OK"),
        "attributes": {"text": "größer", "tokens": [1, 2, 3], "score": 0.5, "is_final": True},
        "events": [],
        "links": [],
        "start_time": FIRST_MOMENT,
        "end_time": FIRST_MOMENT + 0.25,
        "context": context,
        "parent": None,
        "resource": OtelResource(attributes={"service.name": "fixture"}, schema_url=""),
    }
    return Span(**{**fields, **changes})


async def fill(store: LightningStore, clock: Clock) -> None:
    await store.add_resources({"prompt": PromptTemplate(template="Say {word}.", engine="f-string")})
    await store.update_resources("mine", {"model": LLM(endpoint="http://localhost:1/v1", model="m", api_key="k")})
    await fill_rollouts(store)
    await fill_late_rollouts(store, clock)
    await store.update_worker("idle-worker", {"cpu": 0.25})
    done = await store.start_run("done", config={"lr": 0.1}, metadata={"seed": 3})
    for step in range(3):
        await store.add_metrics(done.run_id, step, {"reward": step / 2, "loss": 1.0 - step / 4})
    await store.finish_run(done.run_id, "succeeded", summary={"reward_mean": 1.0})
    for status in ("failed", "stopped"):
        run = await store.start_run(status)
        await store.finish_run(run.run_id, status)
    await store.start_run("running")


async def fill_rollouts(store: LightningStore) -> None:
    """Rollouts that are as their callers left them."""
    await store.enqueue_rollout(
        {"n": 1, "deep": [None, {"ä": 1.5}]}, "train", metadata={"k": 1}, rollout_id="succeeded"
    )
    claim = await store.dequeue_rollout("worker-1")
    assert claim is not None
    event = Event(name="said", attributes={"what": "hello"}, timestamp=FIRST_MOMENT)
    link = Link(context=SpanContext(trace_id=f"{8:032x}", span_id=f"{9:016x}", is_remote=True, trace_state={"a": "b"}))
    await store.add_span(span_of(claim, 1, "first", events=[event], links=[link]))
    await store.add_many_spans([span_of(claim, 2, "second"), span_of(claim, 3, "third")])
    await store.finish_attempt("succeeded", claim.attempt.attempt_id, "succeeded", metadata={"note": "well done"})
    await store.enqueue_rollout("fails twice", "val", config=RolloutConfig(max_attempts=2, retry_condition=["failed"]),
                                rollout_id="failed")  # fmt: skip
    for _ in range(2):
        claim = await store.dequeue_rollout("worker-1")
        assert claim is not None
        await store.add_span(span_of(claim, 1, "broken", status=TraceStatus(status_code="ERROR", description="no")))
        await store.update_attempt("failed", "latest", status="failed")
    await store.enqueue_rollout("nobody wants it", rollout_id="cancelled")
    await store.update_rollout("cancelled", status="cancelled")
    await store.enqueue_rollout("preparing", rollout_id="preparing")
    await store.dequeue_rollout("worker-2")
    await store.enqueue_rollout("running", "test", rollout_id="running")
    claim = await store.dequeue_rollout("worker-1")
    assert claim is not None
    await store.add_span(span_of(claim, 1, "begun"))


async def fill_late_rollouts(store: LightningStore, clock: Clock) -> None:
    """Rollouts whose attempts ran out of time, and the queue."""
    for rollout_id, config in (
        ("silent", RolloutConfig(unresponsive_seconds=60.0)),
        ("requeuing", RolloutConfig(timeout_seconds=60.0, max_attempts=2, retry_condition=["timeout"])),
    ):
        await store.enqueue_rollout(rollout_id, rollout_id=rollout_id, config=config)
        claim = await store.dequeue_rollout("worker-3")
        assert claim is not None
        await store.add_span(span_of(claim, 1, "late"))
    clock.now += 120.0
    await store.query_rollouts()  # the watchdog looks
    for number in range(2):
        await store.enqueue_rollout({"queued": number}, rollout_id=f"queuing-{number}")


async def write(path: Path) -> None:
    clock = Clock()
    async with SqliteLightningStore(path, clock=clock) as store:
        await fill(store, clock)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1])))
