"""Ends an algorithm that waits for rollouts which nobody will run.

Runners end before the algorithm does when they have run as many rollouts as they may. An algorithm that has what it
needs by then goes on; one that waits for rollouts which are still in the queue is ended, with the reason.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from agentlightning.errors import TrainingError
from agentlightning.execution.base import AlgorithmBundle, OwnsWorker
from agentlightning.execution.events import ExecutionEvent
from agentlightning.store.base import LightningStore
from agentlightning.types import RolloutStatus
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 5.0
"""How long rollouts may wait without runners: the algorithm may be about to end by itself, or others may join."""
POLL_SECONDS: Final = 0.25
POLL_SHARE: Final = 0.05
"""Between two looks at the workers, as a share of the time they may be silent."""
SILENCE_SECONDS: Final = 60.0
"""A worker of another training that gave a sign of life since then may run the rollouts."""


@dataclass(frozen=True)
class OrphanedQueueGuard:
    """An algorithm bundle that is ended when its runners are gone and the rollouts it sent stay in the queue."""

    algorithm: AlgorithmBundle
    """Its `give_up` is called with the error, if it has one; else it is cancelled."""
    are_runners_gone: Callable[[], bool]
    owns_worker: OwnsWorker | None = None
    """Says which workers in the store are the runners that may be gone; None if nobody knows."""
    patience_seconds: float = field(default_factory=lambda: PATIENCE_SECONDS)

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None:
        work = asyncio.ensure_future(self.algorithm(store, event))
        watch = asyncio.ensure_future(self._until_orphaned(store, event))
        give_up: Callable[[TrainingError], object] = getattr(self.algorithm, "give_up", lambda error: work.cancel())
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                logger.error("%s", watch.result())
                give_up(watch.result())
                await asyncio.wait([work])
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.wait([work, watch])
        if work.cancelled() and not watch.cancelled():
            raise watch.result()
        work.result()

    async def _until_orphaned(self, store: LightningStore, event: ExecutionEvent) -> TrainingError:
        """Returns the error when rollouts have waited without runners for too long."""
        since: float | None = None
        while True:
            await asyncio.sleep(min(POLL_SECONDS, self.patience_seconds))
            count = 0
            if self.are_runners_gone() and not event.is_set() and not await self._has_others(store):
                run_id = getattr(self.algorithm, "run_id", None)
                count = await _count(store, "queuing", "requeuing", run_id=run_id)
            if count == 0:
                since = None
                continue
            since = time.monotonic() if since is None else since
            if time.monotonic() - since >= self.patience_seconds:
                return TrainingError(
                    f"All runners have ended, and {count} rollouts are still in the queue, so the algorithm would "
                    "wait for ever; raise max_rollouts or n_runners, or leave max_rollouts out."
                )

    async def _has_others(self, store: LightningStore) -> bool:
        """Whether a worker of another training may run the rollouts, as far as the store can say."""
        is_ours = self.owns_worker or (lambda worker_id: False)
        with log_failures(logger, "Workers could not be read", level=logging.WARNING):
            workers = [worker for worker in await store.query_workers() if not is_ours(worker.worker_id)]
            signs = [
                sign or 0.0
                for one in workers
                for sign in (one.last_heartbeat_time, one.last_dequeue_time, one.last_busy_time)
            ]
            return time.time() - max(signs, default=0.0) < SILENCE_SECONDS
        return True


async def until_workers_silent(
    store: LightningStore, patience_seconds: float, run_id: str | None = None
) -> TrainingError:
    """Returns an error when workers have come, all have fallen silent, and rollouts wait that none of them runs.

    A worker that never came may still come. One that gives no heartbeats may be busy: while anything runs, somebody is
    there. What counts is that a sign of life is new, so that no two clocks are compared.
    """
    first = last = await _last_sign(store)
    since = time.monotonic()
    while True:
        await asyncio.sleep(patience_seconds * POLL_SHARE)
        sign = await _last_sign(store)
        if sign != last or sign == first:
            last, since = sign, time.monotonic()
        elif (
            time.monotonic() - since > patience_seconds
            and await _count(store, "queuing", "requeuing", run_id=run_id)
            and await _count(store, "preparing", "running", if_unreadable=1) == 0
        ):
            return TrainingError(
                f"No worker is left: rollouts wait in the queue, and none of the workers has been heard of for "
                f"{patience_seconds:g} s; start runners again, and the training once more."
            )


async def _last_sign(store: LightningStore) -> float | None:
    """When a worker last gave a sign of life, by the store's clock; None if none did, or the store cannot say."""
    with log_failures(logger, "Workers could not be read", level=logging.WARNING):
        signs: list[float] = []
        for field_name in ("last_heartbeat_time", "last_dequeue_time"):
            (latest,) = await store.query_workers(sort_by=field_name, sort_order="desc", limit=1) or (None,)
            signs.append((getattr(latest, field_name, None)) or 0.0)
        return max(signs) or None
    return None


async def _count(
    store: LightningStore, *statuses: RolloutStatus, run_id: str | None = None, if_unreadable: int = 0
) -> int:
    """How many rollouts have one of these statuses; of a run that its rollouts name, its own."""
    with log_failures(logger, "The queue could not be read", level=logging.WARNING):
        own = None if run_id is None else [run_id]
        if own is not None and (await store.query_rollouts(run_id_in=own, limit=0)).total == 0:
            own = None
        return (await store.query_rollouts(status_in=list(statuses), run_id_in=own, limit=1)).total
    return if_unreadable
