"""What the store knows of workers: signs of life, and whether they have work."""

from agentlightning.store.copies import replaced
from agentlightning.store.lifecycle import worker_as_seen
from agentlightning.store.selection import Selection, choose
from agentlightning.store.transaction import Transaction
from agentlightning.types import Attempt, PaginatedResult, Worker, WorkerStatus

WORKER_FIELDS = frozenset(Worker.model_fields) - {"heartbeat_stats", "claims"}
"""Fields a query may filter and sort by."""


def put_worker(tx: Transaction, before: Worker | None, worker: Worker) -> None:
    """Write a worker, and tell of a change of its status."""
    tx.put(worker)
    if before is None or before.status != worker.status:
        tx.note("worker", status=worker.status, name=worker.worker_id)


def show_worker_busy(tx: Transaction, now: float, worker_id: str, attempt: Attempt, **changes: object) -> None:
    """The worker has taken up an attempt."""
    ids = {"current_rollout_id": attempt.rollout_id, "current_attempt_id": attempt.attempt_id}
    show_worker(tx, worker_id, status="busy", last_busy_time=now, **ids, **changes)


def show_worker_idle(
    tx: Transaction, now: float, worker_id: str, *, status: WorkerStatus = "idle", **changes: object
) -> None:
    """The worker has nothing to do, because it finished or because it asked for work in vain."""
    ids = {"current_rollout_id": None, "current_attempt_id": None}
    show_worker(tx, worker_id, status=status, last_idle_time=now, **ids, **changes)


def show_worker(tx: Transaction, worker_id: str, **changes: object) -> None:
    """Write what has changed about a worker, new or not."""
    before = tx.get(Worker, worker_id)
    put_worker(tx, before, replaced(before or Worker(worker_id=worker_id), **changes))


def release_worker(tx: Transaction, now: float, attempt: Attempt) -> None:
    """The attempt is over: its worker is idle, unless it has taken up another one meanwhile.

    Of a worker whose attempt the store gave up, nobody knows what it does.
    """
    if attempt.worker_id is None:
        return
    worker = tx.get(Worker, attempt.worker_id)
    if worker is None or worker.current_attempt_id in (None, attempt.attempt_id):
        is_known = attempt.status not in ("timeout", "unresponsive")
        show_worker_idle(tx, now, attempt.worker_id, status="idle" if is_known else "unknown")


def get_worker_by_id(tx: Transaction, now: float, worker_id: str) -> Worker | None:
    worker = tx.get(Worker, worker_id)
    return None if worker is None else worker_as_seen(worker, now, tx.limits.lease_seconds)


def query_workers(tx: Transaction, now: float, **asked: object) -> PaginatedResult[Worker]:
    workers = [worker_as_seen(each, now, tx.limits.lease_seconds) for each in tx.select(Worker, Selection()).items]
    return choose(workers, Selection.of(asked, WORKER_FIELDS))
