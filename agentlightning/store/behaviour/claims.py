"""What the store does when a runner takes work: claims, and going from one rollout to the next.

A claim that comes again gives what of it is still open, an empty one nothing: the worker's row has the last claim of
each slot (`store/claims.py`). An empty answer to a claim that waits is kept when the waiting is over.
"""

from collections.abc import Sequence
from typing import Any, Final

from agentlightning.errors import InvalidQuery, InvalidValue
from agentlightning.store.behaviour.records import (
    get_latest_resources,
    get_resources_by_id,
    show_worker_busy,
    show_worker_idle,
)
from agentlightning.store.behaviour.rollouts import begin_attempt, latest_attempt
from agentlightning.store.behaviour.spans import end_attempt
from agentlightning.store.claims import MOST_CLAIM_SLOTS, Claim, ResourcesVersion, claim_with, claimed_ids, slot_of
from agentlightning.store.copies import attempted, detached
from agentlightning.store.lifecycle import is_queuing, is_running, lease_seconds
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.transaction import Transaction
from agentlightning.types import AttemptedRollout, AttemptStatus, Rollout, Span, Worker

MOST_ID_CHARACTERS: Final = 256


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
    claimed = _claimed_before(tx, worker_id, claim_id)
    if claimed is not None:
        return claimed
    claimed = _take(tx, now, limit, worker_id, heartbeat_interval)
    _show_claimer(tx, now, worker_id, claimed, claim_id if claimed or not wait else None)
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
    claimed = _claimed_before(tx, worker_id, claim_id)
    if claimed is None:
        end_attempt(
            *(tx, now, (rollout_id, attempt_id), status),
            spans=spans,
            metadata=metadata,
            output=output,
            claiming_worker=worker_id,
        )
        claimed = _take(tx, now, 1, worker_id, heartbeat_interval)
        _show_claimer(tx, now, worker_id, claimed, claim_id)
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
                claimed.append(begin_attempt(tx, now, rollout, worker_id, is_claimed=True, lease_until=lease_until))
    return claimed


def _show_claimer(
    tx: Transaction, now: float, worker_id: str | None, claimed: Sequence[AttemptedRollout], claim_id: str | None
) -> None:
    """Write that a worker has asked for work, and under the id of its claim what it was given."""
    if worker_id is None:
        return
    changes: dict[str, Any] = {"last_dequeue_time": now}
    if claim_id is not None:
        slot, counter = slot_of(claim_id)
        worker = tx.get(Worker, worker_id)
        claims = {} if worker is None else {each: last for each, last in worker.claims.items() if each != slot}
        if len(claims) >= MOST_CLAIM_SLOTS:
            del claims[next(iter(claims))]
        changes["claims"] = {**claims, slot: (counter, claimed_ids(claimed))}
    if claimed:
        show_worker_busy(tx, now, worker_id, claimed[-1].attempt, **changes)
    else:
        show_worker_idle(tx, now, worker_id, **changes)


def _claimed_before(tx: Transaction, worker_id: str | None, claim_id: str | None) -> list[AttemptedRollout] | None:
    """What is still open of a claim that was made before; nothing of one that was overtaken; None of one that is new.

    What is still open was neither ended nor cancelled nor given to another since.
    """
    if claim_id is not None and not (0 < len(claim_id) <= MOST_ID_CHARACTERS and claim_id.isprintable()):
        raise InvalidValue(
            f"The id {claim_id[:20]!r} of a claim has {len(claim_id)} characters; "
            f"give one of 1 to {MOST_ID_CHARACTERS} printable ones."
        )
    worker = None if claim_id is None or worker_id is None else tx.get(Worker, worker_id)
    if claim_id is None or worker is None:
        return None
    slot, counter = slot_of(claim_id)
    last, ids = worker.claims.get(slot, (-1, []))
    if counter > last:
        return None
    still_open = []
    for rollout_id, attempt_id in ids if counter == last else ():
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
