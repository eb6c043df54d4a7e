"""What a worker that died was working on is given back, so that others can take it up."""

import logging
import time
from typing import Final

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout

__all__ = ["recover_attempts", "worker_name"]

logger = logging.getLogger(__name__)

_OPEN: Final = ("preparing", "running")


def worker_name(worker_id: int) -> str:
    """What runners call themselves in the store, unless they are given another name."""
    return f"Worker-{worker_id}"


async def recover_attempts(store: LightningStore, worker_id: str, reason: str) -> list[str]:
    """Mark the open attempts of a worker as unresponsive; returns the ids of their rollouts.

    Whether a rollout is tried again is said by its own configuration.
    """
    recovered: list[str] = []
    for rollout in await store.query_rollouts(status=_OPEN):
        if not isinstance(rollout, AttemptedRollout) or rollout.attempt.worker_id != worker_id:
            continue
        if rollout.attempt.status not in _OPEN:
            continue
        note = {"type": "WorkerLost", "message": reason, "time": time.time()}
        metadata = {**(rollout.attempt.metadata or {}), "error": note}
        try:
            await store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="unresponsive", metadata=metadata
            )
        except StoreError:  # it has ended meanwhile
            logger.info("Attempt %s of %s needs no recovery.", rollout.attempt.attempt_id, worker_id)
        else:
            recovered.append(rollout.rollout_id)
    if recovered:
        logger.warning("%s: %s. Given back: %s.", worker_id, reason, ", ".join(recovered))
    return recovered
