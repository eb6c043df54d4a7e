"""What the store does with heartbeats: the worker lives, and so does what it says it works on.

An agent may work in silence for longer than `unresponsive_seconds`; as long as its runner names the attempt in its
heartbeats, it is not given up.
"""

from collections.abc import Iterator
from typing import Any

from agentlightning.store.behaviour.attempts import change_attempt, status_changes
from agentlightning.store.behaviour.rollouts import latest_attempt
from agentlightning.store.behaviour.workers import put_worker
from agentlightning.store.claims import RUNNING_ATTEMPTS
from agentlightning.store.lifecycle import WORKING_STATUSES
from agentlightning.store.operations import UNSET, Unset
from agentlightning.store.transaction import Transaction
from agentlightning.store.values import detached_value, replaced
from agentlightning.types import Worker


def update_worker(
    tx: Transaction, now: float, worker_id: str, heartbeat_stats: dict[str, Any] | None | Unset = UNSET
) -> Worker:
    before = tx.get_record(Worker, worker_id)
    changes = {} if isinstance(heartbeat_stats, Unset) else {"heartbeat_stats": detached_value(heartbeat_stats)}
    worker = replaced(before or Worker(worker_id=worker_id), last_heartbeat_time=now, **changes)
    put_worker(tx, before, worker)
    if isinstance(heartbeat_stats, dict):
        for rollout_id, attempt_id in _named_attempts(heartbeat_stats.get(RUNNING_ATTEMPTS)):
            _keep_alive(tx, now, worker_id, rollout_id, attempt_id)
    return worker


def _named_attempts(named: Any) -> Iterator[tuple[str, str]]:
    """The pairs of ids in it; statistics are the worker's own, and may hold anything under this name too."""
    for pair in named if isinstance(named, (list, tuple)) else ():
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(each, str) for each in pair):
            yield pair[0], pair[1]


def _keep_alive(tx: Transaction, now: float, worker_id: str, rollout_id: str, attempt_id: str) -> None:
    """A sign of life of the latest attempt of a rollout, if it is this worker's and still at work."""
    rollout, attempt = tx.get_rollout(rollout_id), latest_attempt(tx, rollout_id)
    if rollout is None or attempt is None or attempt.attempt_id != attempt_id or attempt.worker_id != worker_id:
        return
    if attempt.status in WORKING_STATUSES and rollout.status in WORKING_STATUSES:
        change_attempt(tx, now, rollout, attempt, {**status_changes("running", now), "last_heartbeat_time": now})
