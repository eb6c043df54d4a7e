"""The watch over the runners of a training: their work is given back when they die, and an algorithm that waits for
rollouts which nobody will run is ended with the reason.

Nobody will run them when the runners that we placed have all failed; when they have all ended, as they do after
`max_rollouts`, and nobody else works for the store; or when workers came, all have been silent for the length of a
lease, and nothing runs. A worker that never came may still come.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from agentlightning.errors import TrainingError
from agentlightning.execution.base import AlgorithmBundle, OwnsWorker
from agentlightning.execution.events import ExecutionEvent
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS
from agentlightning.types import RolloutStatus
from agentlightning.utils.deadline import POLL_SECONDS, until
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 5.0
"""How long rollouts may wait without runners: the algorithm may be about to end by itself, or others may join."""
SILENCE_SECONDS: Final = 60.0
"""A worker of another training that gave a sign of life since then may run the rollouts."""
REMINDER_SECONDS: Final = 60.0
"""Between two lines that say that no worker has come yet."""
POLL_SHARE: Final = 0.05
"""Between two reads of the workers, as a share of the time they may be silent."""


class PlacedRunners:
    """The runners that a strategy has placed; without arguments, those that others place.

    Args:
        have_ended: Whether all of them have.
        owns_worker: Whether a worker in the store is one of them.
        stop: Stops them; while the algorithm runs, one of them that fails sets it.
    """

    def __init__(
        self,
        have_ended: Callable[[], bool] = lambda: False,
        owns_worker: OwnsWorker = lambda worker_id: False,
        stop: ExecutionEvent | None = None,
    ) -> None:
        self.have_ended, self.owns_worker, self._stop = have_ended, owns_worker, stop

    def have_failed(self) -> bool:
        """Whether the algorithm would wait for them in vain; why is for the strategy to raise."""
        return self._stop is not None and self._stop.is_set()

    async def recover(self, store: LightningStore) -> None:
        """Give back the work of those that have died since the last call."""

    async def dismiss(self, timeout_seconds: float) -> None:
        """Stop them, because the algorithm needs them no more, and wait for their end for so long at most."""
        if self._stop is not None:
            self._stop.set()
            await until(self.have_ended, timeout_seconds=timeout_seconds, interval_seconds=POLL_SECONDS / 4)


class Watch:
    """Watches over the runners for as long as its block, in which the algorithm runs.

    If nobody is left to run the algorithm's rollouts, its `give_up` is called with the error; if it has none, the task
    of the block is cancelled, and the error is raised behind it. If a runner has failed, or has stopped all, the
    algorithm has `grace_seconds` to end by itself before it is cancelled; why is for the strategy to raise.

    Args:
        algorithm: Its `run_id`, if it has one, says whose rollouts are counted.
    """

    def __init__(
        self,
        algorithm: AlgorithmBundle,
        store: LightningStore,
        stop: ExecutionEvent,
        runners: PlacedRunners,
        *,
        grace_seconds: float = 0.0,
        poll_seconds: float = POLL_SECONDS,
        lease_seconds: float = LOST_WORKER_SECONDS,
    ) -> None:
        self._algorithm, self._store, self._stop, self._runners = algorithm, store, stop, runners
        self._grace_seconds, self._poll_seconds, self._lease_seconds = grace_seconds, poll_seconds, lease_seconds
        self._error: TrainingError | None = None
        self._has_cancelled = False
        self._sign: float | None = None
        """Of life that a worker gave last. That it is new is all that counts, so that no two clocks are compared."""
        self._silent_since = time.monotonic()
        self._has_worker = False
        """Whether one has come, or is still there from before."""
        self._next_reminder = self._silent_since + REMINDER_SECONDS

    async def __aenter__(self) -> None:
        watched = asyncio.current_task()
        assert watched is not None  # we are in a coroutine
        self._watching = asyncio.create_task(self._watch(watched), name="watch")

    async def __aexit__(self, _: object, error: BaseException | None, traceback: object) -> bool:
        self._watching.cancel()
        await asyncio.wait([self._watching])
        if not (self._has_cancelled and isinstance(error, asyncio.CancelledError)):
            return False
        self._watching.result()  # the watch itself may have failed
        if self._error is not None:
            raise self._error
        return True

    async def _watch(self, watched: "asyncio.Task[object]") -> None:
        try:
            self._error = await self._until_hopeless()
        except Exception:
            self._has_cancelled = watched.cancel()
            raise
        logger.error("%s", self._error or "Runners have died or failed, so the algorithm is stopped.")
        give_up: Callable[[TrainingError], object] | None = getattr(self._algorithm, "give_up", None)
        if self._error is not None and give_up is not None:
            give_up(self._error)
            return
        if self._error is None and self._stop.is_set():
            await asyncio.sleep(self._grace_seconds)
        self._has_cancelled = watched.cancel()

    async def _until_hopeless(self) -> TrainingError | None:
        """Returns why the algorithm waits in vain; None if its runners have failed."""
        self._sign = max((await self._signs_of_life() or {}).values(), default=None)
        next_read = self._silent_since
        orphaned_since: float | None = None
        while True:
            await self._runners.recover(self._store)
            if self._runners.have_failed():
                return None
            now = time.monotonic()
            count = await self._count_orphans()
            orphaned_since = None if count == 0 else orphaned_since or now
            if orphaned_since is not None and now - orphaned_since >= PATIENCE_SECONDS:
                return TrainingError(
                    f"All runners have ended, and {count} rollouts are still in the queue, so the algorithm would "
                    "wait for ever; raise max_rollouts or n_runners, or leave max_rollouts out."
                )
            if now >= next_read:
                next_read = now + self._lease_seconds * POLL_SHARE
                if await self._is_abandoned(now):
                    return TrainingError(
                        "No worker is left: rollouts wait in the queue, and none of the workers has been heard of for "
                        f"{self._lease_seconds:g} s; start runners again, and the training once more."
                    )
            await asyncio.sleep(self._poll_seconds)

    async def _count_orphans(self) -> int:
        """How many rollouts wait after our runners have ended, if nobody else may run them."""
        if not self._runners.have_ended() or self._stop.is_set():
            return 0
        signs = await self._signs_of_life()
        since = time.time() - SILENCE_SECONDS
        if signs is None or any(sign > since and not self._runners.owns_worker(one) for one, sign in signs.items()):
            return 0
        return await self._count("queuing", "requeuing")

    async def _is_abandoned(self, now: float) -> bool:
        """Whether rollouts wait that no worker is left for; says now and then that none has come."""
        sign = max((await self._signs_of_life() or {}).values(), default=None)
        if sign not in (None, self._sign):
            self._sign, self._silent_since, self._has_worker = sign, now, True
        if not self._has_worker and now >= self._next_reminder:
            self._next_reminder = now + REMINDER_SECONDS
            if waiting := await self._count("queuing", "requeuing"):
                logger.warning("No worker has come yet, and %d rollouts wait for one.", waiting)
        if not self._has_worker or now - self._silent_since <= self._lease_seconds:
            return False
        if await self._count("preparing", "running", if_unreadable=1):
            return False  # a worker that gives no heartbeats may be busy
        return await self._count("queuing", "requeuing") > 0

    async def _signs_of_life(self) -> dict[str, float] | None:
        """When each worker gave its last one, by the store's clock; None if the store cannot say."""
        with log_failures(logger, "Workers could not be read", level=logging.WARNING):
            return {
                one.worker_id: max(one.last_heartbeat_time or 0, one.last_dequeue_time or 0, one.last_busy_time or 0)
                for one in await self._store.query_workers()
            }
        return None

    async def _count(self, *statuses: RolloutStatus, if_unreadable: int = 0) -> int:
        """How many rollouts have one of these statuses; of a run that its rollouts name, its own."""
        run_id = getattr(self._algorithm, "run_id", None)
        with log_failures(logger, "The queue could not be read", level=logging.WARNING):
            own = None if run_id is None else [run_id]
            if own is not None and (await self._store.query_rollouts(run_id_in=own, limit=0)).total == 0:
                own = None
            return (await self._store.query_rollouts(status_in=list(statuses), run_id_in=own, limit=1)).total
        return if_unreadable
