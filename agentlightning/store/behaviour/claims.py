"""What the store does when a runner takes work: claims, their return, and going from one rollout to the next."""

from collections.abc import Sequence
from typing import Any

from agentlightning.errors import InvalidQuery
from agentlightning.store.behaviour.resources import get_latest_resources, get_resources_by_id
from agentlightning.store.behaviour.rollouts import begin_attempt, change_status, latest_attempt
from agentlightning.store.behaviour.spans import end_attempt, find_grant, put_grant
from agentlightning.store.behaviour.workers import release_worker, show_worker_idle
from agentlightning.store.claims import Claim, Grant, ResourcesVersion, claim_with, claimed_ids
from agentlightning.store.copies import attempted, detached
from agentlightning.store.lifecycle import is_queuing, is_running, lease_seconds
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.transaction import Transaction
from agentlightning.types import AttemptedRollout, AttemptStatus, Rollout, RolloutStatus, Span


def dequeue_rollout(
    tx: Transaction,
    now: float,
    worker_id: str | None = None,
    *,
    wait: float | None = None,
    claim_id: str | None = None,
    heartbeat_interval: float | None = None,
) -> AttemptedRollout | None:
    options: dict[str, Any] = {"wait": wait, "claim_id": claim_id, "heartbeat_interval": heartbeat_interval}
    claimed = dequeue_many_rollouts(tx, now, worker_id=worker_id, **options)
    return claimed[0] if claimed else None


def dequeue_many_rollouts(
    tx: Transaction,
    now: float,
    *,
    limit: int = 1,
    worker_id: str | None = None,
    wait: float | None = None,
    claim_id: str | None = None,
    heartbeat_interval: float | None = None,
) -> list[AttemptedRollout]:
    """With `wait`, the store looks again if there is nothing now."""
    if limit < 1:
        raise InvalidQuery(f"limit is {limit}; claim at least one rollout.")
    grant = None if claim_id is None else find_grant(tx, "claim", claim_id, worker_id)
    if grant is not None:
        return _still_open(tx, grant)
    claimed = _take(tx, now, limit, worker_id, heartbeat_interval)
    if claim_id is not None and (claimed or not wait):
        put_grant(tx, now, "claim", claim_id, worker_id, claimed_ids(claimed))
    return claimed


def claim_rollouts(
    tx: Transaction,
    now: float,
    *,
    limit: int = 1,
    worker_id: str | None = None,
    wait: float | None = None,
    claim_id: str | None = None,
    heartbeat_interval: float | None = None,
    known_resources: Sequence[ResourcesVersion] = (),
) -> list[Claim]:
    options: dict[str, Any] = {"wait": wait, "claim_id": claim_id, "heartbeat_interval": heartbeat_interval}
    claimed = dequeue_many_rollouts(tx, now, limit=limit, worker_id=worker_id, **options)
    return _with_resources(tx, now, claimed, known_resources)


def finish_and_claim(
    tx: Transaction,
    now: float,
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus,
    *,
    spans: Sequence[Span] = (),
    metadata: dict[str, object] | None | Unset = UNSET,
    output: object = UNSET,
    worker_id: str | None = None,
    claim_id: str | None = None,
    heartbeat_interval: float | None = None,
    known_resources: Sequence[ResourcesVersion] = (),
) -> Claim | None:
    grant = None if claim_id is None else find_grant(tx, "claim", claim_id, worker_id)
    if grant is None:
        end_attempt(
            *(tx, now, (rollout_id, attempt_id), status),
            spans=spans,
            metadata=metadata,
            output=output,
            claiming_worker=worker_id,
        )
        claimed = _take(tx, now, 1, worker_id, heartbeat_interval)
        if claim_id is not None:
            put_grant(tx, now, "claim", claim_id, worker_id, claimed_ids(claimed))
    else:  # both steps were done together, and stay done
        claimed = _still_open(tx, grant)
    return next(iter(_with_resources(tx, now, claimed, known_resources)), None)


def _take(
    tx: Transaction, now: float, limit: int, worker_id: str | None, heartbeat_interval: float | None
) -> list[AttemptedRollout]:
    """Give a worker the head of the queue, with leases if it gives heartbeats."""
    claimed: list[AttemptedRollout] = []
    lease_until = None
    if worker_id is not None and heartbeat_interval is not None and heartbeat_interval > 0:
        lease_until = now + lease_seconds(tx.limits.lease_seconds, heartbeat_interval)
    while len(claimed) < limit and (popped := tx.pop(limit - len(claimed))):
        for rollout_id in popped:
            rollout = tx.get(Rollout, rollout_id)
            if rollout is not None and is_queuing(rollout):
                claimed.append(begin_attempt(tx, now, rollout, worker_id, dequeued=True, lease_until=lease_until))
    if worker_id is not None and not claimed:
        show_worker_idle(tx, now, worker_id, dequeued=True)
    return claimed


def _still_open(tx: Transaction, grant: Grant) -> list[AttemptedRollout]:
    """What of a claim was neither ended nor returned nor cancelled since."""
    still_open = []
    for rollout_id, attempt_id in grant.given:
        rollout, attempt = tx.get(Rollout, rollout_id), latest_attempt(tx, rollout_id)
        if rollout is not None and attempt is not None and attempt.attempt_id == attempt_id and is_running(rollout):
            still_open.append(attempted(rollout, attempt))
    return still_open


def _with_resources(
    tx: Transaction, now: float, rollouts: Sequence[AttemptedRollout], known: Sequence[ResourcesVersion]
) -> list[Claim]:
    claims = []
    for rollout in rollouts:
        named = rollout.resources_id
        resources = get_latest_resources(tx, now) if named is None else get_resources_by_id(tx, now, named)
        claim = claim_with(rollout, resources, known)
        claims.append(Claim(detached(claim.rollout), claim.version, detached(claim.resources)))
    return claims


def return_claims(tx: Transaction, now: float, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[bool]:
    # The last one first, because each goes before those that are in the queue already.
    undone = [_return_claim(tx, now, *ids) for ids in reversed(rollout_attempt_ids)]
    return undone[::-1]


def _return_claim(tx: Transaction, now: float, rollout_id: str, attempt_id: str) -> bool:
    rollout = tx.get(Rollout, rollout_id)
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
