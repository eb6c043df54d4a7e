"""Rules of a rollout's life: which state follows which, and when patience ends.

Pure functions of data and `now`; they touch no storage and no clock. `store/behaviour` asks them and writes the
outcome.
"""

from agentlightning.types import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus

__all__ = [
    "ATTEMPT_STATUSES",
    "DUE_NOW",
    "FINAL_ROLLOUT_STATUSES",
    "ROLLOUT_STATUSES",
    "attempt_end_time",
    "attempt_status_after_span",
    "due_time",
    "is_finished",
    "is_queuing",
    "is_running",
    "overdue_status",
    "rollout_status_after_span",
    "rollout_status_from_attempt",
]

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
