"""Rollouts that nobody will run: when every runner has ended or is gone, an algorithm must not wait for them for ever.

Runners end before the algorithm does when they have run as many rollouts as they may. An algorithm that has what it
needs by then goes on; one that waits for rollouts which are still in the queue is ended, with the reason.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.errors import TrainingError
from agentlightning.execution.base import AlgorithmBundle, OwnsWorker
from agentlightning.execution.events import ExecutionEvent
from agentlightning.store.base import LightningStore
from agentlightning.types import Worker

__all__ = ["Attended", "until_deserted"]

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 5.0
"""How long rollouts may wait without runners: the algorithm may be about to end by itself, or others may join."""
LOOK_SECONDS: Final = 0.25
LOOK_SHARE: Final = 0.05
"""How often workers are looked at, as a share of the time they may be silent."""
SILENCE_SECONDS: Final = 60.0
"""A worker of somebody else that was heard of since then may run them."""


@dataclass(frozen=True)
class Attended:
    """An algorithm that is ended when it waits in vain."""

    algorithm: AlgorithmBundle
    """Told by its `give_up`, if it has one; else cancelled."""
    are_runners_gone: Callable[[], bool]
    owns_worker: OwnsWorker | None = None
    """Says which workers in the store are the runners that may be gone; None if nobody knows."""
    patience_seconds: float = field(default_factory=lambda: PATIENCE_SECONDS)

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> None:
        work = asyncio.ensure_future(self.algorithm(store, event))
        watch = asyncio.ensure_future(self._until_stranded(store, event))
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._give_up(work, watch.result())
        finally:
            for task in (work, watch):
                if not task.done():
                    task.cancel()
            await asyncio.wait([work, watch])
        work.result()

    async def _give_up(self, work: "asyncio.Future[None]", error: TrainingError) -> None:
        logger.error("%s", error)
        give_up: Callable[[TrainingError], None] | None = getattr(self.algorithm, "give_up", None)
        if give_up is None:
            work.cancel()
            await asyncio.wait([work])
            raise error
        give_up(error)
        await asyncio.wait([work])

    async def _until_stranded(self, store: LightningStore, event: ExecutionEvent) -> TrainingError:
        """Returns what to say, when there is something to say."""
        since: float | None = None
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, self.patience_seconds))
            count = 0
            if self.are_runners_gone() and not event.is_set():
                count = await self._count_stranded(store)
            if count == 0:
                since = None
                continue
            since = time.monotonic() if since is None else since
            if time.monotonic() - since >= self.patience_seconds:
                return TrainingError(
                    f"All runners have ended, and {count} rollouts are still in the queue, so the algorithm would "
                    "wait for ever; raise max_rollouts or n_runners, or leave max_rollouts out."
                )

    async def _count_stranded(self, store: LightningStore) -> int:
        """How many rollouts wait in the queue, if nobody else is there to run them."""
        try:
            waiting = await store.perform("query_rollouts", {"status": ["queuing", "requeuing"], "limit": 1})
            if not waiting or await self._has_others(store):
                return 0
        except Exception as error:  # noqa: BLE001 # it is looked again
            logger.warning("The queue could not be looked at: %s", error)
            return 0
        return int(getattr(waiting, "total", len(waiting)))

    async def _has_others(self, store: LightningStore) -> bool:
        try:
            workers = await store.query_workers()
        except NotImplementedError:  # a store of the 0.2 release knows no workers
            return False
        is_ours = self.owns_worker or (lambda worker_id: False)
        return any(not is_ours(worker.worker_id) and _was_heard_of(worker) for worker in workers)


async def until_deserted(store: LightningStore, patience_seconds: float) -> TrainingError:
    """Returns what to say when workers have come, all have fallen silent, and rollouts wait that none of them runs.

    A worker that never came may still come. One that gives no heartbeats may be busy: while anything runs, somebody is
    there. What counts is that a sign is new, so that no two clocks are compared.
    """
    first = last = await _last_sign(store)
    since = time.monotonic()
    while True:
        await asyncio.sleep(patience_seconds * LOOK_SHARE)
        sign = await _last_sign(store)
        if sign != last or sign == first:
            last, since = sign, time.monotonic()
        elif time.monotonic() - since > patience_seconds and await _waits_in_vain(store):
            return TrainingError(
                f"No worker is left: rollouts wait in the queue, and none of the workers has been heard of for "
                f"{patience_seconds:g} s; start runners again, and the training once more."
            )


async def _last_sign(store: LightningStore) -> float | None:
    """When a worker was last heard of, by the store's clock; None if none was, or the store cannot say."""
    signs: list[float] = []
    try:
        for field_name in ("last_heartbeat_time", "last_dequeue_time"):
            (latest,) = await store.query_workers(sort_by=field_name, sort_order="desc", limit=1) or (None,)
            signs.append((getattr(latest, field_name, None)) or 0.0)
    except NotImplementedError:  # a store of the 0.2 release knows no workers
        return None
    except Exception as error:  # noqa: BLE001 # it is looked again
        logger.warning("Workers could not be looked at: %s", error)
        return None
    return max(signs) or None


async def _waits_in_vain(store: LightningStore) -> bool:
    """Whether rollouts are in the queue and none is being run."""
    try:
        waiting = await store.perform("query_rollouts", {"status": ["queuing", "requeuing"], "limit": 1})
        running = await store.perform("query_rollouts", {"status": ["preparing", "running"], "limit": 1})
    except Exception as error:  # noqa: BLE001 # it is looked again
        logger.warning("The queue could not be looked at: %s", error)
        return False
    return bool(waiting) and not running


def _was_heard_of(worker: Worker) -> bool:
    moments: list[Any] = [worker.last_heartbeat_time, worker.last_dequeue_time, worker.last_busy_time]
    return time.time() - max(moment or 0.0 for moment in moments) < SILENCE_SECONDS
