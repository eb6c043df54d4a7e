"""What the store does with heartbeats, and when they stop: the worker lives, and so does what it says it works on.

An agent may work in silence for longer than `unresponsive_seconds`; as long as its runner names the attempt in its
heartbeats, it is not given up. A worker that gave heartbeats and falls silent loses what it claimed.
"""

import logging
from collections.abc import Iterator, Mapping

from agentlightning.store.behaviour.attempts import change_attempt, mark_overdue, status_changes
from agentlightning.store.behaviour.rollouts import latest_attempt
from agentlightning.store.behaviour.workers import put_worker
from agentlightning.store.claims import RUNNING_ATTEMPTS
from agentlightning.store.copies import detached, replaced
from agentlightning.store.lifecycle import WORKING_STATUSES, is_silent, loss_of
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.selection import Condition, Selection
from agentlightning.store.transaction import Transaction
from agentlightning.types import Rollout, Worker

logger = logging.getLogger(__name__)

HEARD_OF = ("idle", "busy")
"""Statuses of workers that are not known to be gone."""


def update_worker(
    tx: Transaction, now: float, worker_id: str, heartbeat_stats: dict[str, object] | None | Unset = UNSET
) -> Worker:
    before = tx.get(Worker, worker_id)
    changes = {} if isinstance(heartbeat_stats, Unset) else {"heartbeat_stats": detached(heartbeat_stats)}
    worker = replaced(before or Worker(worker_id=worker_id), last_heartbeat_time=now, **changes)
    put_worker(tx, before, worker)
    if isinstance(heartbeat_stats, dict):
        for rollout_id, attempt_id in _named_attempts(heartbeat_stats.get(RUNNING_ATTEMPTS)):
            _keep_alive(tx, now, worker_id, rollout_id, attempt_id)
    return worker


def _named_attempts(named: object) -> Iterator[tuple[str, str]]:
    """The pairs of ids in it; statistics are the worker's own, and may hold anything under this name too."""
    for pair in named if isinstance(named, (list, tuple)) else ():
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(each, str) for each in pair):
            yield pair[0], pair[1]


def _keep_alive(tx: Transaction, now: float, worker_id: str, rollout_id: str, attempt_id: str) -> None:
    """A sign of life of the latest attempt of a rollout, if it is this worker's and still at work."""
    rollout, attempt = tx.get(Rollout, rollout_id), latest_attempt(tx, rollout_id)
    if rollout is None or attempt is None or attempt.attempt_id != attempt_id or attempt.worker_id != worker_id:
        return
    if attempt.status in WORKING_STATUSES and rollout.status in WORKING_STATUSES:
        change_attempt(tx, now, rollout, attempt, {**status_changes("running", now), "last_heartbeat_time": now})


def mark_worker_lost(tx: Transaction, now: float, worker_id: str, reason: str) -> list[str]:
    return _give_back(tx, now, {worker_id: reason})


def sweep(tx: Transaction, now: float, patience_seconds: float, counted_since: float, is_overdue: bool) -> None:
    """The watchdog: take from silent workers what they claimed, and look at what has run out of time if that is due."""
    silence_by_worker = {
        worker.worker_id: now - (worker.last_heartbeat_time or now)
        for worker in _silent_workers(tx, now, patience_seconds, counted_since)
    }
    if silence_by_worker:
        reason = "worker {} has been silent for {:.0f} s"
        _give_back(tx, now, {name: reason.format(name, seconds) for name, seconds in silence_by_worker.items()})
    if is_overdue:
        mark_overdue(tx, now)


def needs_sweep(tx: Transaction, now: float, patience_seconds: float, counted_since: float, is_overdue: bool) -> bool:
    """Whether a sweep would change anything, so that a store need not write to find out."""
    return is_overdue or bool(_silent_workers(tx, now, patience_seconds, counted_since))


def _silent_workers(tx: Transaction, now: float, patience_seconds: float, counted_since: float) -> list[Worker]:
    heard_of = tx.select(Worker, Selection((Condition.of("status_in", HEARD_OF),))).items
    limits = {"patience_seconds": patience_seconds, "counted_since": counted_since}
    return [worker for worker in heard_of if is_silent(worker, now, **limits)]


def _give_back(tx: Transaction, now: float, reasons_by_worker: Mapping[str, str]) -> list[str]:
    """End the open attempts of workers that are gone; returns the ids of their rollouts."""
    is_open = Condition.of("status_in", WORKING_STATUSES)
    lost: list[str] = []
    for rollout in tx.select(Rollout, Selection((is_open,))).items:
        attempt = latest_attempt(tx, rollout.rollout_id)
        reason = reasons_by_worker.get(attempt.worker_id or "") if attempt is not None else None
        if attempt is not None and attempt.status in WORKING_STATUSES and reason is not None:
            metadata = {**(attempt.metadata or {}), "error": loss_of(reason, now)}
            change_attempt(tx, now, rollout, attempt, {**status_changes("unresponsive", now), "metadata": metadata})
            lost.append(rollout.rollout_id)
    for worker_id, reason in reasons_by_worker.items():
        logger.info("Lost: %s.", reason)
        before = tx.get(Worker, worker_id)
        if before is not None:
            gone = replaced(before, status="unknown", current_rollout_id=None, current_attempt_id=None)
            put_worker(tx, before, gone)
    return lost
