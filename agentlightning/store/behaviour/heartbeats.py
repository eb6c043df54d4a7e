"""What the store does with heartbeats: the worker lives, and so does what it says it works on.

An agent may work in silence for longer than `unresponsive_seconds`; as long as its runner names the attempt in its
heartbeats, it is not given up and keeps its lease. The answer names the attempts that are the worker's no more.
"""

import logging
from collections.abc import Iterator

from agentlightning.store.behaviour.attempts import change_attempt, lose_attempt, new_lease, status_changes
from agentlightning.store.behaviour.rollouts import latest_attempt
from agentlightning.store.behaviour.workers import put_worker
from agentlightning.store.claims import RUNNING_ATTEMPTS
from agentlightning.store.copies import detached, replaced
from agentlightning.store.lifecycle import WORKING_STATUSES
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.selection import Condition, Selection
from agentlightning.store.transaction import Transaction
from agentlightning.types import RenewedWorker, Rollout, Worker

logger = logging.getLogger(__name__)


def update_worker(
    tx: Transaction, now: float, worker_id: str, heartbeat_stats: dict[str, object] | None | Unset = UNSET
) -> RenewedWorker:
    before = tx.get(Worker, worker_id)
    changes = {} if isinstance(heartbeat_stats, Unset) else {"heartbeat_stats": detached(heartbeat_stats)}
    worker = replaced(before or Worker(worker_id=worker_id), last_heartbeat_time=now, **changes)
    put_worker(tx, before, worker)
    lost: list[tuple[str, str]] = []
    if isinstance(heartbeat_stats, dict):
        named = _named_attempts(heartbeat_stats.get(RUNNING_ATTEMPTS))
        lost = [ids for ids in named if not _keep_alive(tx, now, worker, *ids)]
    return RenewedWorker.model_construct(**worker.__dict__, lost_attempts=lost)


def _named_attempts(named: object) -> Iterator[tuple[str, str]]:
    """The pairs of ids in it; statistics are the worker's own, and may hold anything under this name too."""
    for pair in named if isinstance(named, (list, tuple)) else ():
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(each, str) for each in pair):
            yield pair[0], pair[1]


def _keep_alive(tx: Transaction, now: float, worker: Worker, rollout_id: str, attempt_id: str) -> bool:
    """A sign of life of an attempt, which renews its lease; whether the attempt is still this worker's.

    One that was given up stays the worker's until another begins, and counts if it ends before.
    """
    rollout, attempt = tx.get(Rollout, rollout_id), latest_attempt(tx, rollout_id)
    if rollout is None or attempt is None or rollout.status == "cancelled":
        return False
    if attempt.attempt_id != attempt_id or attempt.worker_id != worker.worker_id:
        return False
    if attempt.status in WORKING_STATUSES and rollout.status in WORKING_STATUSES:
        changes = {**status_changes("running", now), "last_heartbeat_time": now}
        # One that a store without leases gave out gets its first; one that was never queued gets none.
        was_claimed = worker.last_dequeue_time is not None and attempt.start_time <= worker.last_dequeue_time
        if attempt.lease_until is not None or was_claimed:
            changes["lease_until"] = new_lease(tx, now, worker)
        change_attempt(tx, now, rollout, attempt, changes)
    return True


def mark_worker_lost(
    tx: Transaction, now: float, worker_id: str, reason: str, *, claimed_with: str | None = None
) -> list[str]:
    worker, is_open = tx.get(Worker, worker_id), Condition.of("status_in", WORKING_STATUSES)
    slots = {} if worker is None else worker.claims
    own = {slot: ids for slot, (_, ids) in slots.items() if slot.startswith(claimed_with or "")}
    is_sole = claimed_with is None or len(own) == len(slots) > 0
    owned = {ids for given in own.values() for ids in given}
    lost: list[str] = []
    for rollout in tx.select(Rollout, Selection((is_open,))).items:
        attempt = latest_attempt(tx, rollout.rollout_id)
        if attempt is None or attempt.worker_id != worker_id or attempt.status not in WORKING_STATUSES:
            continue
        if is_sole or (attempt.rollout_id, attempt.attempt_id) in owned:
            lose_attempt(tx, now, rollout, attempt, reason)
            lost.append(rollout.rollout_id)
    if lost:
        logger.info("%d rollouts were lost with worker '%s': %s.", len(lost), worker_id, reason)
    worker = tx.get(Worker, worker_id)
    if worker is not None and (lost or claimed_with is None):
        put_worker(tx, worker, replaced(worker, status="unknown", current_rollout_id=None, current_attempt_id=None))
    return lost
