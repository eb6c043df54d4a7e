"""What the store does with attempts: changes, heartbeats, and the end of those that run out of time.

A heartbeat says that the worker lives, and so does what it works on: an agent may work in silence for longer than
`unresponsive_seconds`; as long as its runner names the attempt in its heartbeats, it is not given up and keeps its
lease. The answer names the attempts that are the worker's no more. The watchdog ends the others.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from agentlightning.errors import InvalidValue, NotFound
from agentlightning.store.behaviour.records import put_worker, release_worker, show_worker_busy
from agentlightning.store.behaviour.rollouts import (
    begin_attempt,
    change_status,
    known_rollout,
    latest_attempt,
    reschedule,
)
from agentlightning.store.claims import RUNNING_ATTEMPTS
from agentlightning.store.copies import attempted, detached, replaced
from agentlightning.store.lifecycle import (
    ATTEMPT_STATUSES,
    HEARTBEAT_INTERVAL,
    WELL_STATUSES,
    WORKING_STATUSES,
    attempt_end_time,
    due_time,
    has_lost_lease,
    is_lost,
    is_running,
    lease_seconds,
    loss_of,
    overdue_status,
    rollout_status_from_attempts,
)
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.selection import Condition, Selection, choose
from agentlightning.store.transaction import Setting, Transaction
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    PaginatedResult,
    RenewedWorker,
    Rollout,
    Worker,
)

logger = logging.getLogger(__name__)

LEASE_FLOOR: Final = "lease_floor"
"""The setting with the moment below which no lease ends."""
NO_RESULTS: Final[Mapping[str, Any]] = {}
ATTEMPT_FIELDS = frozenset(Attempt.model_fields) - {"metadata"}
"""Fields a query may sort by."""


def start_attempt(
    tx: Transaction, now: float, rollout_id: str, worker_id: str | None = None, *, attempt_id: str | None = None
) -> AttemptedRollout:
    rollout = known_rollout(tx, rollout_id)
    begun = next((each for each in tx.get_attempts(rollout_id) if each.attempt_id == attempt_id), None)
    return begin_attempt(tx, now, rollout, worker_id, attempt_id) if begun is None else attempted(rollout, begun)


def query_attempts(tx: Transaction, now: float, rollout_id: str, **asked: object) -> PaginatedResult[Attempt]:
    selection = Selection.of({"sort_by": "sequence_id", **asked}, ATTEMPT_FIELDS)
    return choose(tx.get_attempts(rollout_id), selection)


def get_latest_attempt(tx: Transaction, now: float, rollout_id: str) -> Attempt | None:
    return latest_attempt(tx, rollout_id)


def find_attempt(attempts: Sequence[Attempt], attempt_id: str | Literal["latest"]) -> Attempt | None:
    if attempts and attempt_id in ("latest", attempts[-1].attempt_id):
        return attempts[-1]
    return next((attempt for attempt in reversed(attempts) if attempt.attempt_id == attempt_id), None)


def known_attempt(tx: Transaction, rollout_id: str, attempt_id: str) -> Attempt:
    """The attempt of that id, which must exist."""
    attempts = tx.get_attempts(rollout_id)
    if not attempts:
        raise NotFound(f"No attempts found for rollout {rollout_id}; start or dequeue one first.")
    attempt = find_attempt(attempts, attempt_id)
    if attempt is None:
        raise NotFound(f"Attempt {attempt_id} not found for rollout {rollout_id}.")
    return attempt


def update_attempt(
    tx: Transaction,
    now: float,
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus | Unset = UNSET,
    worker_id: str | Unset = UNSET,
    last_heartbeat_time: float | Unset = UNSET,
    metadata: dict[str, Any] | None | Unset = UNSET,
) -> Attempt:
    rollout = known_rollout(tx, rollout_id)
    attempt = known_attempt(tx, rollout_id, attempt_id)
    given = {"worker_id": worker_id, "last_heartbeat_time": last_heartbeat_time, "metadata": detached(metadata)}
    changes = {name: value for name, value in given.items() if not isinstance(value, Unset)}
    if not isinstance(status, Unset):
        changes |= status_changes(status, now)
    return change_attempt(tx, now, rollout, attempt, changes)


def status_changes(status: AttemptStatus, now: float) -> dict[str, Any]:
    """The fields of an attempt that takes this status now."""
    if status not in ATTEMPT_STATUSES:
        raise InvalidValue(f"'{status}' is not an attempt status; use one of {list(ATTEMPT_STATUSES)}.")
    return {"status": status, "end_time": attempt_end_time(status, now)}


def change_attempt(
    tx: Transaction,
    now: float,
    rollout: Rollout,
    attempt: Attempt,
    changes: dict[str, Any],
    *,
    results: Mapping[str, Any] = NO_RESULTS,
    claiming_worker: str | None = None,
) -> Attempt:
    """Write an attempt; a status given to the latest one decides the rollout, unless that was cancelled.

    Args:
        results: What changes of the rollout besides.
        claiming_worker: Claims another rollout in the same step, so that its idleness need not be written.
    """
    is_latest = attempt.sequence_id == len(tx.get_attempts(rollout.rollout_id))
    if not is_latest and is_lost(attempt):
        return attempt  # its worker was given up, and another has run the rollout since then: it speaks too late
    before, changed = rollout, replaced(attempt, **changes)
    tx.put(changed)
    if is_latest:
        if "status" in changes and rollout.status != "cancelled":
            # Only an attempt that failed makes the earlier ones matter, which a store may have to read.
            attempts = [changed] if changed.status in WELL_STATUSES else tx.get_attempts(rollout.rollout_id)
            status = rollout_status_from_attempts(attempts, rollout.config)
            rollout = change_status(tx, now, rollout, status, **results)
        elif results:
            tx.put(replaced(rollout, **results))
        reschedule(tx, (before, attempt), (rollout, changed))
    if changed.worker_id is not None:
        if changed.end_time is not None:
            if changed.worker_id != claiming_worker:
                release_worker(tx, now, changed)
        elif "worker_id" in changes or "status" in changes:
            show_worker_busy(tx, now, changed.worker_id, changed)
    return changed


def lose_attempt(tx: Transaction, now: float, rollout: Rollout, attempt: Attempt, reason: str) -> Attempt:
    """End an attempt that was lost with its worker."""
    metadata = {**(attempt.metadata or {}), "error": loss_of(reason, now)}
    return change_attempt(tx, now, rollout, attempt, {**status_changes("unresponsive", now), "metadata": metadata})


def new_lease(tx: Transaction, since: float, worker: Worker | None) -> float | None:
    """When a lease ends that this worker gets at a time; None in a store that waits for workers for ever."""
    stats = worker.heartbeat_stats if worker is not None else None
    seconds = lease_seconds(tx.limits.lease_seconds, (stats or {}).get(HEARTBEAT_INTERVAL))
    return None if math.isinf(seconds) else since + seconds


def lease_floor(tx: Transaction, opened_time: float, resumed_time: float) -> float:
    """The moment as of which every lease is renewed: before it nobody may have taken heartbeats.

    It is stored for all processes. An opening moves it once in two leases at most, so that a program that opens the
    store again and again keeps no lost work from the queue.
    """
    setting = tx.get(Setting, LEASE_FLOOR)
    before = floor = -math.inf if setting is None else float(setting.value)
    if opened_time > before + 2 * tx.limits.lease_seconds:
        floor = opened_time
    floor = max(floor, resumed_time)
    if floor > before:
        tx.put(Setting(LEASE_FLOOR, str(floor)))
    return floor


def mark_overdue(tx: Transaction, now: float, opened_time: float, resumed_time: float) -> None:
    """The watchdog: end attempts that took too long or fell silent, and finish or requeue their rollouts.

    Args:
        opened_time: When this process opened the store.
        resumed_time: When it last went on after a suspension, or its clock was set.
    """

    def lease_end(rollout_id: str) -> float:
        attempt = latest_attempt(tx, rollout_id)
        return 0.0 if attempt is None or attempt.lease_until is None else attempt.lease_until

    for rollout_id in sorted(tx.overdue(now), key=lease_end):
        rollout = known_rollout(tx, rollout_id)
        attempt = latest_attempt(tx, rollout_id)
        if attempt is None or not is_running(rollout):
            tx.schedule(rollout_id, None)
            continue
        status = overdue_status(rollout, attempt, now)
        if status is not None:
            end_time = attempt.end_time if status == attempt.status else attempt_end_time(status, now)
            attempt = change_attempt(tx, now, rollout, attempt, {"status": status, "end_time": end_time})
        elif has_lost_lease(attempt, now):
            worker = None if attempt.worker_id is None else tx.get(Worker, attempt.worker_id)
            renewed = new_lease(tx, lease_floor(tx, opened_time, resumed_time), worker)
            if renewed is None or renewed >= now:
                attempt = replaced(attempt, lease_until=renewed)
                tx.put(attempt)
            elif (new_lease(tx, opened_time, worker) or now) < now:  # else another process may know better than this
                last_sign = max(attempt.start_time, (worker and worker.last_heartbeat_time) or 0.0)
                reason = f"worker {attempt.worker_id} has been silent for {now - last_sign:.0f} s"
                logger.info("Lost: %s.", reason)
                attempt = lose_attempt(tx, now, rollout, attempt, reason)
        tx.schedule(rollout_id, due_time(known_rollout(tx, rollout_id), attempt))


# ---------------------------------------------------------------------- heartbeats


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
