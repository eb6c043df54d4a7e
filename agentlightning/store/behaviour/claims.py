"""What the store does when a runner goes from one rollout to the next: several operations as one step."""

from collections.abc import Sequence
from typing import Any

from agentlightning.store.behaviour.resources import get_latest_resources, get_resources_by_id
from agentlightning.store.behaviour.rollouts import dequeue_many_rollouts
from agentlightning.store.behaviour.spans import finish_attempt
from agentlightning.store.claims import Claim, ResourcesVersion, claim_with
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.transaction import Transaction
from agentlightning.types import AttemptStatus, Span


def claim_rollouts(
    tx: Transaction,
    now: float,
    *,
    limit: int = 1,
    worker_id: str | None = None,
    known_resources: Sequence[ResourcesVersion] = (),
) -> list[Claim]:
    claims = []
    for rollout in dequeue_many_rollouts(tx, now, limit=limit, worker_id=worker_id):
        named = rollout.resources_id
        resources = get_latest_resources(tx, now) if named is None else get_resources_by_id(tx, now, named)
        claims.append(claim_with(rollout, resources, known_resources))
    return claims


def finish_and_claim(
    tx: Transaction,
    now: float,
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus,
    *,
    spans: Sequence[Span] = (),
    metadata: dict[str, Any] | None | Unset = UNSET,
    worker_id: str | None = None,
    known_resources: Sequence[ResourcesVersion] = (),
) -> Claim | None:
    finish_attempt(tx, now, rollout_id, attempt_id, status, spans=spans, metadata=metadata)
    claims = claim_rollouts(tx, now, worker_id=worker_id, known_resources=known_resources)
    return claims[0] if claims else None
