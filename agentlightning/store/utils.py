"""Public path of the rules in `agentlightning.store.lifecycle`, and of helpers that build on them.

The two asynchronous helpers drive a store of the caller's own through its callbacks. They take no locks.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

from agentlightning.store.lifecycle import overdue_status, rollout_status_from_attempt
from agentlightning.types import Attempt, AttemptedRollout, AttemptStatus, Rollout, RolloutConfig, RolloutStatus

__all__ = [
    "LATENCY_BUCKETS",
    "healthcheck",
    "propagate_status",
    "rollout_status_from_attempt",
    "scan_unhealthy_rollouts",
]

UpdateRolloutStatus = Callable[[str, RolloutStatus], Awaitable[Rollout]]
UpdateAttemptStatus = Callable[[str, str, AttemptStatus], Awaitable[Attempt]]

LATENCY_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds for histograms of store operations."""


async def propagate_status(
    update_rollout_status: UpdateRolloutStatus, attempt: Attempt, config: RolloutConfig
) -> Rollout:
    """Give the rollout the status that its latest attempt makes of it."""
    return await update_rollout_status(attempt.rollout_id, rollout_status_from_attempt(attempt, config))


async def healthcheck(
    rollouts: Sequence[AttemptedRollout],
    update_rollout_status: UpdateRolloutStatus,
    update_attempt_status: UpdateAttemptStatus,
) -> None:
    """Look at working rollouts and mark what has ended, timed out or fallen silent."""
    for rollout in rollouts:
        attempt = rollout.attempt
        if attempt.status in ("failed", "succeeded"):
            await propagate_status(update_rollout_status, attempt, rollout.config)
            continue
        status = overdue_status(rollout, attempt, time.time())
        if status == "unresponsive" and attempt.status == "preparing" and attempt.last_heartbeat_time:
            await update_attempt_status(rollout.rollout_id, attempt.attempt_id, "running")
        if status is not None:
            await update_attempt_status(rollout.rollout_id, attempt.attempt_id, status)


def scan_unhealthy_rollouts(rollouts: Sequence[AttemptedRollout]) -> dict[tuple[str, str], AttemptStatus]:
    """The new status of every attempt that has run out of time, by (rollout id, attempt id)."""
    found: dict[tuple[str, str], AttemptStatus] = {}
    for rollout in rollouts:
        status = overdue_status(rollout, rollout.attempt, time.time())
        if status is not None and status != rollout.attempt.status:
            found[rollout.rollout_id, rollout.attempt.attempt_id] = status
    return found
