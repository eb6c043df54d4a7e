"""Operations that are made of others, for stores that were written before there were these.

They are what the contract says, but for being one step: a store of ours does each in one transaction.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentlightning.errors import StoreError
from agentlightning.store.claims import Claim, ResourcesVersion, claim_with
from agentlightning.store.lifecycle import WORKING_STATUSES, loss_of
from agentlightning.store.operations import Unset
from agentlightning.types import Attempt, AttemptedRollout, AttemptStatus, EnqueueRolloutRequest, Rollout, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from agentlightning.store.base import LightningStore

__all__ = [
    "add_otel_span",
    "add_spans",
    "claim_rollouts",
    "dequeue_rollouts",
    "enqueue_rollouts",
    "finish",
    "mark_workers_lost",
    "sequence_ids",
]


async def enqueue_rollouts(store: "LightningStore", rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
    enqueued = []
    for rollout in rollouts:
        given = {name: value for name in rollout.model_fields_set if (value := getattr(rollout, name)) is not None}
        enqueued.append(await store.enqueue_rollout(**given))
    return enqueued


async def dequeue_rollouts(store: "LightningStore", limit: int, **options: Any) -> list[AttemptedRollout]:
    """Waits, if it may, for the first only."""
    claimed: list[AttemptedRollout] = []
    while len(claimed) < limit:
        given = {
            name: value for name, value in options.items() if value is not None and (name != "wait" or not claimed)
        }
        rollout = await store.perform("dequeue_rollout", given)
        if rollout is None:
            break
        claimed.append(rollout)
    return claimed


async def claim_rollouts(
    store: "LightningStore", limit: int, known: Sequence[ResourcesVersion], **options: Any
) -> list[Claim]:
    given = {name: value for name, value in options.items() if value is not None}
    claims = []
    for rollout in await store.perform("dequeue_many_rollouts", {"limit": limit, **given}):
        named = rollout.resources_id
        latest = store.get_latest_resources() if named is None else store.get_resources_by_id(named)
        claims.append(claim_with(rollout, await latest, known))
    return claims


async def add_spans(store: "LightningStore", spans: Sequence[Span]) -> list[Span | None]:
    return [await store.add_span(span) for span in spans]


async def add_otel_span(
    store: "LightningStore", rollout_id: str, attempt_id: str, readable_span: "ReadableSpan", sequence_id: int | None
) -> Span | None:
    if sequence_id is None:
        sequence_id = await store.get_next_span_sequence_id(rollout_id, attempt_id)
    ids: dict[str, Any] = {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": sequence_id}
    return await store.add_span(Span.from_opentelemetry(readable_span, **ids))


async def sequence_ids(store: "LightningStore", attempts: Sequence[tuple[str, str]]) -> list[int]:
    return [await store.get_next_span_sequence_id(*attempt) for attempt in attempts]


async def finish(
    store: "LightningStore",
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus,
    spans: Sequence[Span],
    *,
    metadata: dict[str, Any] | None | Unset,
    output: Any | Unset,
) -> Attempt:
    """A store of an earlier release has no place for an output but the attempt's metadata."""
    if not isinstance(output, Unset):
        if isinstance(metadata, Unset):
            latest = await store.get_latest_attempt(rollout_id)
            metadata = latest.metadata if latest is not None and latest.attempt_id == attempt_id else None
        metadata = {**(metadata or {}), "output": output}
    numbers = await store.get_many_span_sequence_ids([(rollout_id, attempt_id)] * len(spans)) if spans else []
    numbered = [span.model_copy(update={"sequence_id": n}) for span, n in zip(spans, numbers, strict=True)]
    if numbered:
        await store.add_many_spans(numbered)
    changes: dict[str, Any] = {} if isinstance(metadata, Unset) else {"metadata": metadata}
    return await store.update_attempt(rollout_id, attempt_id, status=status, **changes)


async def mark_workers_lost(store: "LightningStore", is_lost: Callable[[str], bool], reason: str) -> list[str]:
    lost = []
    for rollout in await store.query_rollouts(status=("preparing", "running")):
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        if attempt is None or attempt.worker_id is None or not is_lost(attempt.worker_id):
            continue
        if attempt.status in WORKING_STATUSES:
            metadata = {**(attempt.metadata or {}), "error": loss_of(reason, time.time())}
            with suppress(StoreError):  # it has ended meanwhile
                await store.update_attempt(
                    rollout.rollout_id, attempt.attempt_id, status="unresponsive", metadata=metadata
                )
                lost.append(rollout.rollout_id)
    return lost
