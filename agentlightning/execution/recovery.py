"""What a worker that died was working on is given back, so that others can take it up."""

import logging
import time
from collections.abc import Callable
from typing import Final

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout

__all__ = ["recover_attempts"]

logger = logging.getLogger(__name__)

_OPEN: Final = ("preparing", "running")


async def recover_attempts(store: LightningStore, is_lost: Callable[[str], bool], reason: str) -> list[str]:
    """Mark the open attempts of workers that are lost as unresponsive; returns the ids of their rollouts.

    Whether a rollout is tried again is said by its own configuration.
    """
    recovered: list[str] = []
    for rollout in await store.query_rollouts(status=_OPEN):
        worker_id = rollout.attempt.worker_id if isinstance(rollout, AttemptedRollout) else None
        if not isinstance(rollout, AttemptedRollout) or worker_id is None or not is_lost(worker_id):
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
        logger.warning("Given back, because %s: %s.", reason, ", ".join(recovered))
    return recovered
