"""The queue of a store, seen as tasks of the v0.1 protocol.

Ids keep the old form `rollout-<uuid4>`. How long a claim may take is written into each rollout as its time limit, so
that the store itself puts a task back whose client has vanished.
"""

import uuid
from typing import Any

from agentlightning.store.base import LightningStore, is_queuing
from agentlightning.types import Rollout, RolloutConfig, RolloutMode, Task, TaskInput

__all__ = ["LEGACY_PREFIX", "TaskQueue"]

LEGACY_PREFIX = "rollout-"
"""How ids of tasks begin that were queued through this protocol."""

_MANY_ATTEMPTS = 1_000_000
"""The old protocol never gives a task up."""


class TaskQueue:
    """Tasks waiting in a store."""

    def __init__(self, store: LightningStore, task_timeout_seconds: float | None) -> None:
        self._store = store
        self._config = RolloutConfig()
        if task_timeout_seconds is not None:
            self._config = RolloutConfig(
                timeout_seconds=task_timeout_seconds, max_attempts=_MANY_ATTEMPTS, retry_condition=["timeout"]
            )

    async def put(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        rollout_id: str | None = None,
    ) -> Rollout:
        """Add a task at the tail; one whose id is known already stays as it is."""
        rollout = await self._store.enqueue_rollout(
            sample,
            mode,
            resources_id,
            self._config,
            metadata or {},
            rollout_id=rollout_id or f"{LEGACY_PREFIX}{uuid.uuid4()}",
        )
        if resources_id is None and rollout.resources_id is not None and is_queuing(rollout):
            # The store binds to the resources of now; a task without an id takes those that are latest when it is run.
            rollout = await self._store.update_rollout(rollout.rollout_id, resources_id=None)
        return rollout

    async def get_nowait(self, worker_id: str | None = None) -> Task | None:
        """Claim the task at the head; None if the queue is empty."""
        claim = await self._store.dequeue_rollout(worker_id)
        return None if claim is None else Task.of_rollout(claim)

    async def put_back(self, task: Task) -> None:
        """Put a task at the tail, whoever has claimed it; its claims stay counted."""
        rollout = await self.put(task.input, task.mode, task.resources_id, task.metadata, rollout_id=task.rollout_id)
        if not is_queuing(rollout):
            await self._store.update_rollout(task.rollout_id, status="requeuing")
