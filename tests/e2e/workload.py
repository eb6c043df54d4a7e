"""A small training loop against a store, whose outcome does not depend on the order of events.

An algorithm enqueues, publishes and measures; runners claim, trace and finish. Every fifth rollout fails at its first
attempt and is tried again. `final_state` tells everything that must be the same whatever happened on the way.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agentlightning.errors import StoreUnavailable
from agentlightning.store import LightningStore
from agentlightning.store.claims import Claim
from agentlightning.types import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    OtelResource,
    PromptTemplate,
    RolloutConfig,
    Span,
    TraceStatus,
)

__all__ = ["RUN_ID", "final_state", "fulfil", "make_span", "run_algorithm", "run_runner"]

RUN_ID = "run"
TWICE = RolloutConfig(max_attempts=2, retry_condition=["failed"])
ROUNDS = 12
ROLLOUTS_PER_ROUND = 5
PATIENCE_SECONDS = 40.0


def make_span(claim: AttemptedRollout, sequence_id: int, name: str) -> Span:
    """A span whose id tells where it belongs."""
    return Span(
        rollout_id=claim.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        sequence_id=sequence_id,
        trace_id=f"{1:032x}",
        span_id=f"{claim.attempt.attempt_id}-{name}",
        parent_id=None,
        name=name,
        status=TraceStatus(status_code="OK"),
        attributes={"text": "x" * 300},
        events=[],
        links=[],
        start_time=1.0,
        end_time=2.0,
        context=None,
        parent=None,
        resource=OtelResource(attributes={}, schema_url=""),
    )


async def run_algorithm(store: LightningStore) -> int:
    """Enqueue everything and wait for it; returns how many rollouts ended in time."""
    await store.start_run("loop", run_id=RUN_ID)
    enqueued: list[str] = []
    for round_number in range(ROUNDS):
        await store.add_resources({"prompt": PromptTemplate(template=f"v{round_number}", engine="f-string")})
        first = round_number * ROLLOUTS_PER_ROUND
        one = await store.enqueue_rollout({"n": first}, config=TWICE)
        requests = [EnqueueRolloutRequest(input={"n": first + n}, config=TWICE) for n in range(1, ROLLOUTS_PER_ROUND)]
        many = await store.enqueue_many_rollouts(requests)
        enqueued += [one.rollout_id, *(rollout.rollout_id for rollout in many)]
        await store.add_metrics(RUN_ID, round_number, {"loss": float(round_number)})
    finished = await store.wait_for_rollouts(enqueued, timeout=PATIENCE_SECONDS)
    await store.finish_run(RUN_ID)
    return len(finished)


async def run_runner(store: LightningStore, worker_id: str, leave: asyncio.Event, *, wait: float | None) -> None:
    """Claim and finish until told to leave; a claim whose answer was lost is made again."""
    number = 1
    while not leave.is_set():
        claims: Sequence[Claim] = []
        with suppress(StoreUnavailable):
            claims = await store.claim_rollouts(worker_id=worker_id, wait=wait, claim_id=f"0:{number}")
            number += 1
        for claim in claims:
            await fulfil(store, claim.rollout)
        if not claims:
            await asyncio.sleep(0.01)


async def fulfil(store: LightningStore, claim: AttemptedRollout) -> None:
    """Trace an attempt and end it."""
    rollout_id, attempt_id = claim.rollout_id, claim.attempt.attempt_id
    await store.update_attempt(rollout_id, attempt_id, status="running")
    number = await store.get_next_span_sequence_id(rollout_id, attempt_id)
    await store.add_span(make_span(claim, number, "a"))
    numbers = await store.get_many_span_sequence_ids([(rollout_id, attempt_id)] * 2)
    await store.add_many_spans([make_span(claim, number, name) for number, name in zip(numbers, "bc", strict=True)])
    is_failure = claim.input["n"] % 5 == 0 and claim.attempt.sequence_id == 1
    await store.update_attempt(rollout_id, attempt_id, status="failed" if is_failure else "succeeded")


async def final_state(store: LightningStore) -> dict[str, Any]:
    """What is the same after every run of the workload."""
    statistics = await store.statistics()
    rollouts: Sequence[Any] = await store.query_rollouts()
    run = await store.get_run_by_id(RUN_ID)
    metrics = await store.query_metrics(RUN_ID)
    resources = await store.query_resources()
    told = [await _rollout_state(store, rollout) for rollout in rollouts]
    return {
        "rollouts": sorted(told, key=lambda state: state["n"]),
        "queue_length": statistics["queue_length"],
        "run": run.status if run is not None else None,
        "metrics": [(point.step, point.values) for point in metrics],
        "resources": [update.resources["prompt"].template for update in resources],  # type: ignore[union-attr]
    }


async def _rollout_state(store: LightningStore, rollout: Any) -> dict[str, Any]:
    attempts = await store.query_attempts(rollout.rollout_id)
    order = {attempt.attempt_id: attempt.sequence_id for attempt in attempts}
    spans = await store.query_spans(rollout.rollout_id)
    return {
        "n": rollout.input["n"],
        "status": rollout.status,
        "attempts": [(attempt.sequence_id, attempt.status) for attempt in attempts],
        "spans": sorted((order[span.attempt_id], span.name) for span in spans),
        "sequence_ids": len({span.sequence_id for span in spans}),
    }
