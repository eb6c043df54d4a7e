"""Tasks on their way through the store: drawn in batches, sent, waited for, and read."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from agentlightning.adapter import TraceAdapter, TracerTraceToTriplet, TraceToMessages
from agentlightning.algorithm.apo.journal import Journal
from agentlightning.algorithm.utils import shuffled_batches
from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset, EnqueueRolloutRequest, Rollout, RolloutConfig, RolloutMode

__all__ = [
    "TaskBatch",
    "TaskBatches",
    "cancel_unfinished",
    "finished_rollouts",
    "first_traceback",
    "found_in",
    "messages_adapter",
    "send",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

WAIT_SECONDS: Final = 30.0
"""How long the store is asked to wait at a time; it answers as soon as all are finished."""
SILENCE_SECONDS: Final = 60.0
"""After which an attempt counts as dead; runners give a sign every ten seconds."""
MOST_ATTEMPTS: Final = 3
EARLY_SECONDS: Final = 0.05
"""Rest before a store is asked again that did not wait."""


class TaskBatch(list[_T]):
    """Samples of a data set, and their numbers in it."""

    def __init__(self, dataset: Dataset[_T], numbers: Sequence[int]) -> None:
        super().__init__(dataset[number] for number in numbers)
        self.numbers = list(numbers)


class TaskBatches(Iterator[TaskBatch[_T]]):
    """Batches without end, each drawn once: a run that goes on finds them in its journal.

    Args:
        shuffle: Puts numbers in random order.
    """

    def __init__(
        self, dataset: Dataset[_T], size: int, journal: Journal, name: str, shuffle: Callable[[list[int]], object]
    ) -> None:
        self._dataset = dataset
        self._draws = shuffled_batches(len(dataset), size, shuffle)
        self._journal = journal
        self._name = name
        self._drawn = 0
        self.last: list[int] = []
        """The numbers of the last batch."""

    def __next__(self) -> TaskBatch[_T]:
        drawn = list(next(self._draws))
        self._drawn += 1
        self.last = self._journal.remember(f"{self._name} batch {self._drawn}", lambda: drawn)
        return TaskBatch(self._dataset, self.last)


async def send(
    store: LightningStore, tasks: Sequence[Any], mode: RolloutMode, resources_id: str, *, rollout_ids: list[str] | None
) -> list[str]:
    """Enqueue all tasks or none; returns the ids of their rollouts.

    With ids of the caller's, those that the store knows are not sent again, and those whose runner dies together with
    the caller are tried again.
    """
    config = RolloutConfig(
        unresponsive_seconds=SILENCE_SECONDS, max_attempts=MOST_ATTEMPTS, retry_condition=["unresponsive"]
    )
    requests: list[EnqueueRolloutRequest] = []
    for number, task in enumerate(tasks):
        named: dict[str, Any] = {}
        if rollout_ids is not None:
            named = {"rollout_id": rollout_ids[number], "config": config}
        requests.append(EnqueueRolloutRequest(input=task, mode=mode, resources_id=resources_id, **named))
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


async def finished_rollouts(store: LightningStore, rollout_ids: Sequence[str], timeout: float) -> list[Rollout]:
    """Those that are finished when all are, or when the time is up, in the order of the ids. The store tells that."""
    order = {rollout_id: number for number, rollout_id in enumerate(rollout_ids)}
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        patience = max(0.0, min(WAIT_SECONDS, deadline - began))
        finished = await store.wait_for_rollouts(rollout_ids=list(rollout_ids), timeout=patience)
        now = time.monotonic()
        if len(finished) >= len(rollout_ids) or now >= deadline:
            return sorted(finished, key=lambda rollout: order.get(rollout.rollout_id, len(order)))
        if now - began < patience:
            await asyncio.sleep(min(EARLY_SECONDS, deadline - now))


async def found_in(store: LightningStore, rollout_ids: Sequence[str]) -> int:
    """How many of these rollouts the store knows."""
    return sum([await store.get_rollout_by_id(rollout_id) is not None for rollout_id in rollout_ids])


async def cancel_unfinished(store: LightningStore, rollout_ids: Sequence[str], finished: Sequence[Rollout]) -> int:
    """Take back the rollouts nobody waits for any more; returns how many there were."""
    known = {rollout.rollout_id for rollout in finished}
    late = [rollout_id for rollout_id in rollout_ids if rollout_id not in known]
    for rollout_id in late:
        try:
            await store.update_rollout(rollout_id, status="cancelled")
        except StoreError:  # it has ended meanwhile
            continue
    return len(late)


async def first_traceback(store: LightningStore, rollouts: Sequence[Rollout]) -> str:
    """Why the first of these rollouts failed that says so."""
    for rollout in rollouts:
        for attempt in await store.query_attempts(rollout.rollout_id):
            error = (attempt.metadata or {}).get("error") or {}
            told = error.get("traceback") or error.get("message")
            if told:
                return f"rollout '{rollout.rollout_id}':\n{told}"
    return "their attempts do not tell why"


def messages_adapter(adapter: TraceAdapter[Any] | None, algorithm: str) -> TraceToMessages:
    """The given adapter if it gives conversations, else a new TraceToMessages.

    Whoever chose another adapter learns that it is not used; a TracerTraceToTriplet is the Trainer's default.
    """
    if isinstance(adapter, TraceToMessages):
        return adapter
    if adapter is not None and type(adapter) is not TracerTraceToTriplet:
        logger.info(
            "%s reads conversations, so it uses a TraceToMessages and not the %s it was given.",
            algorithm,
            type(adapter).__name__,
        )
    return TraceToMessages()
