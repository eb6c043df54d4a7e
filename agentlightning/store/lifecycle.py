"""Rules of a rollout's life: which state follows which, and when patience ends.

Pure functions of data and `now`; they touch no storage and no clock. `store/behaviour` asks them and writes the
outcome.
"""

from collections.abc import Sequence
from typing import Any, Final

from agentlightning.errors import WorkerLost
from agentlightning.types import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus, Run, Worker

ROLLOUT_STATUSES: tuple[RolloutStatus, ...] = (
    "queuing",
    "preparing",
    "running",
    "failed",
    "succeeded",
    "cancelled",
    "requeuing",
)
ATTEMPT_STATUSES: tuple[AttemptStatus, ...] = (
    "preparing",
    "running",
    "failed",
    "succeeded",
    "unresponsive",
    "timeout",
)
FINAL_ROLLOUT_STATUSES = frozenset({"failed", "succeeded", "cancelled"})
QUEUE_STATUSES = frozenset({"queuing", "requeuing"})
WORKING_STATUSES = frozenset({"preparing", "running"})
WELL_STATUSES = WORKING_STATUSES | {"succeeded"}
"""Of attempts that have not failed."""

LOST_WORKER_SECONDS: Final = 300.0
"""How long a lease lasts, unless a store is told otherwise."""
MISSED_HEARTBEATS: Final = 3
"""The lease of a worker that beats rarely lasts this many of its intervals."""
HEARTBEAT_INTERVAL: Final = "interval_seconds"
"""In the statistics of a heartbeat: the seconds until the next one."""
DEFAULT_HEARTBEAT_SECONDS: Final = 10.0
LONGEST_HEARTBEAT_SECONDS: Final = 3600.0
"""A worker that says it beats more rarely is not believed."""
RUN_REPORTS: Final = "reports"
"""In the metadata of a run: that it promises to report, and when it last did."""
LOST_RUN_SECONDS: Final = 300.0
"""How long a run that promised to report may be silent."""
MOST_LOST_ATTEMPTS: Final = 3
"""How many attempts of a rollout may be lost with their workers and not count as tried."""

DUE_NOW = 0.0
"""Due time of a rollout that the watchdog must look at whatever the clock says."""


def is_queuing(rollout: Rollout) -> bool:
    """Waiting in the queue."""
    return rollout.status in QUEUE_STATUSES


def is_running(rollout: Rollout) -> bool:
    """Claimed by a worker."""
    return rollout.status in WORKING_STATUSES


def is_finished(rollout: Rollout) -> bool:
    """Failed, succeeded or cancelled."""
    return rollout.status in FINAL_ROLLOUT_STATUSES


def rollout_status_from_attempt(attempt: Attempt, config: RolloutConfig) -> RolloutStatus:
    """What the latest attempt makes of its rollout."""
    if attempt.status in ("preparing", "running", "succeeded"):
        return attempt.status
    if attempt.status in ("failed", "timeout", "unresponsive"):
        may_retry = attempt.status in config.retry_condition and attempt.sequence_id < config.max_attempts
        return "requeuing" if may_retry else "failed"
    raise ValueError(f"Invalid attempt status: {attempt.status}")


def loss_of(reason: str, now: float) -> dict[str, Any]:
    """What the metadata of an attempt that was lost with its worker say under `error`."""
    return {"type": WorkerLost.__name__, "message": reason, "time": now}


def is_lost(attempt: Attempt) -> bool:
    """Whether an attempt ended because its worker did, which is not the fault of the task."""
    error = (attempt.metadata or {}).get("error")
    return attempt.status == "unresponsive" and isinstance(error, dict) and error.get("type") == WorkerLost.__name__


def rollout_status_from_attempts(attempts: Sequence[Attempt], config: RolloutConfig) -> RolloutStatus:
    """What the latest attempt makes of its rollout, where attempts that were lost do not count as tried."""
    latest = attempts[-1]
    if not config.requeue_lost or latest.status in WELL_STATUSES:
        return rollout_status_from_attempt(latest, config)
    lost = sum(map(is_lost, attempts))
    if is_lost(latest) and lost <= MOST_LOST_ATTEMPTS:
        return "requeuing"
    tried = latest.sequence_id - min(lost, MOST_LOST_ATTEMPTS)
    return rollout_status_from_attempt(latest.model_copy(update={"sequence_id": tried}), config)


def lease_seconds(least_seconds: float, heartbeat_interval: object) -> float:
    """How long the lease of a worker with such heartbeats lasts; the interval is the worker's own word."""
    interval = DEFAULT_HEARTBEAT_SECONDS
    if isinstance(heartbeat_interval, (int, float)) and not isinstance(heartbeat_interval, bool):
        interval = min(heartbeat_interval, LONGEST_HEARTBEAT_SECONDS) if heartbeat_interval > 0 else interval
    return max(least_seconds, MISSED_HEARTBEATS * interval)


def has_lost_lease(attempt: Attempt, now: float) -> bool:
    """Whether a lease has ended of which nothing else decides the attempt."""
    return attempt.lease_until is not None and now > attempt.lease_until and attempt.status in WORKING_STATUSES


def worker_as_seen(worker: Worker, now: float, least_seconds: float) -> Worker:
    """A worker as it is shown: of one that gave heartbeats and has fallen silent for a lease, nobody knows anything."""
    if worker.status == "unknown" or worker.last_heartbeat_time is None:
        return worker
    interval = (worker.heartbeat_stats or {}).get(HEARTBEAT_INTERVAL)
    last_sign = max(worker.last_heartbeat_time, worker.last_dequeue_time or 0.0, worker.last_busy_time or 0.0)
    if now - last_sign <= lease_seconds(least_seconds, interval):
        return worker
    gone = {"status": "unknown", "current_rollout_id": None, "current_attempt_id": None}
    return worker.model_copy(update=gone)


def run_as_seen(run: Run, now: float) -> Run:
    """A run as it is shown: one that promised to report and has fallen silent is lost."""
    if run.status != "running" or not isinstance(reports := run.metadata.get(RUN_REPORTS), dict):
        return run
    last_report = reports.get("last_time")
    if not isinstance(last_report, (int, float)) or not run.start_time <= last_report <= now:  # metadata hold anything
        last_report = run.start_time
    if now - last_report <= LOST_RUN_SECONDS:
        return run
    return run.model_copy(update={"status": "lost", "end_time": last_report})


def attempt_end_time(status: AttemptStatus, now: float) -> float | None:
    """When an attempt that takes this status now ended; None while it works."""
    return None if status in WORKING_STATUSES else now


def attempt_status_after_span(attempt: Attempt, rollout: Rollout) -> AttemptStatus:
    """A span shows that an attempt works; one given up as unresponsive comes back unless its rollout is over."""
    if attempt.status == "preparing":
        return "running"
    if attempt.status == "unresponsive" and not is_finished(rollout):
        return "running"
    return attempt.status


def rollout_status_after_span(rollout: Rollout, attempt_status: AttemptStatus) -> RolloutStatus:
    """What a span of the latest attempt, which now has this status, makes of the rollout."""
    if attempt_status == "running" and not is_finished(rollout):
        return "running"
    return rollout.status


def due_time(rollout: Rollout, attempt: Attempt | None) -> float | None:
    """The moment after which the watchdog has something to decide about a rollout; None if no moment will come."""
    if attempt is None or not is_running(rollout):
        return None
    if _has_ended(attempt) or _works_unannounced(attempt):
        return DUE_NOW
    config = rollout.config
    moments = []
    if config.timeout_seconds is not None:
        moments.append(attempt.start_time + config.timeout_seconds)
    if config.unresponsive_seconds is not None:
        moments.append((attempt.last_heartbeat_time or attempt.start_time) + config.unresponsive_seconds)
    if attempt.lease_until is not None and attempt.status in WORKING_STATUSES:
        moments.append(attempt.lease_until)
    return min(moments, default=None)


def overdue_status(rollout: Rollout, attempt: Attempt, now: float) -> AttemptStatus | None:
    """The status the watchdog gives the latest attempt of a working rollout; None leaves it alone.

    A timeout wins over silence. An attempt that has ended keeps its status, which then decides the rollout.
    """
    if _has_ended(attempt):
        return attempt.status
    config = rollout.config
    if config.timeout_seconds is not None and now - attempt.start_time > config.timeout_seconds:
        return "timeout"
    last_sign = attempt.last_heartbeat_time or attempt.start_time
    if config.unresponsive_seconds is not None and now - last_sign > config.unresponsive_seconds:
        return "unresponsive"
    return "running" if _works_unannounced(attempt) else None


def _has_ended(attempt: Attempt) -> bool:
    return attempt.status in ("failed", "succeeded")


def _works_unannounced(attempt: Attempt) -> bool:
    """A heartbeat came in, but no span yet."""
    return attempt.status == "preparing" and bool(attempt.last_heartbeat_time)
