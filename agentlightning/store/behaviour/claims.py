"""What the store does when a runner goes from one rollout to the next: several operations as one step."""

from collections.abc import Sequence
from typing import Any

from agentlightning.store.behaviour.resources import get_latest_resources, get_resources_by_id
from agentlightning.store.behaviour.rollouts import change_status, dequeue_many_rollouts, latest_attempt
from agentlightning.store.behaviour.spans import finish_attempt
from agentlightning.store.behaviour.workers import release_worker
from agentlightning.store.claims import Claim, ResourcesVersion, claim_with
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.transaction import Transaction
from agentlightning.types import AttemptStatus, RolloutStatus, Span


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
    output: Any | Unset = UNSET,
    worker_id: str | None = None,
    known_resources: Sequence[ResourcesVersion] = (),
) -> Claim | None:
    finish_attempt(tx, now, rollout_id, attempt_id, status, spans=spans, metadata=metadata, output=output)
    claims = claim_rollouts(tx, now, worker_id=worker_id, known_resources=known_resources)
    return claims[0] if claims else None


def return_claims(tx: Transaction, now: float, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[bool]:
    # The last one first, because each goes before those that are in the queue already.
    undone = [_return_claim(tx, now, *ids) for ids in reversed(rollout_attempt_ids)]
    return undone[::-1]


def _return_claim(tx: Transaction, now: float, rollout_id: str, attempt_id: str) -> bool:
    rollout = tx.get_rollout(rollout_id)
    latest = latest_attempt(tx, rollout_id)
    if rollout is None or latest is None or latest.attempt_id != attempt_id:
        return False
    if rollout.status != "preparing" or latest.status != "preparing":
        return False
    tx.remove_latest_attempt(rollout_id)
    tx.schedule(rollout_id, None)
    status: RolloutStatus = "queuing" if latest.sequence_id == 1 else "requeuing"
    tx.push(rollout_id, front=True)
    change_status(tx, now, rollout, status)
    release_worker(tx, now, latest)
    return True
