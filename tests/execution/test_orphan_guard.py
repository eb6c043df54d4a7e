"""An algorithm that waits for rollouts which nobody will run is ended, and told why."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.errors import TrainingError
from agentlightning.execution import ThreadingEvent
from agentlightning.execution.orphan_guard import OrphanedQueueGuard
from agentlightning.store import InMemoryLightningStore, LightningStore


def ours(worker_id: str, number: int | None = None) -> bool:
    return worker_id == "Worker-0"


LONG_SECONDS = 30.0


async def waiting_for_ever(store: LightningStore, event: Any) -> None:
    await asyncio.Event().wait()


async def attend(
    algorithm: Any, store: LightningStore, *, gone: Callable[[], bool] = lambda: True, patience: float = 0.02
) -> None:
    guarded = OrphanedQueueGuard(algorithm, gone, ours, patience)
    await asyncio.wait_for(guarded(store, ThreadingEvent()), LONG_SECONDS)


async def test_algorithm_without_runners_is_ended_while_rollouts_wait() -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout("a")
    await store.enqueue_rollout("b")

    with pytest.raises(TrainingError, match=r"2 rollouts are still in the queue.* raise max_rollouts"):
        await attend(waiting_for_ever, store)


async def test_algorithm_that_can_give_up_is_told() -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout("a")

    class Telling:
        told: "asyncio.Future[TrainingError]"

        async def __call__(self, store: LightningStore, event: Any) -> None:
            self.told = asyncio.get_running_loop().create_future()
            raise await self.told

        def give_up(self, error: TrainingError) -> None:
            self.told.set_result(error)

    with pytest.raises(TrainingError, match="1 rollouts"):
        await attend(Telling(), store)


async def test_algorithm_that_has_what_it_needs_goes_on_without_runners() -> None:
    store = InMemoryLightningStore()
    looks = 0

    def gone() -> bool:
        nonlocal looks
        looks += 1
        return True

    async def working_on(store: LightningStore, event: Any) -> None:
        while looks < 5:
            await asyncio.sleep(0.01)

    await attend(working_on, store, gone=gone)

    assert looks >= 5


@pytest.mark.parametrize("reason", ["runners", "others"])
async def test_algorithm_is_left_alone_while_somebody_may_run_its_rollouts(reason: str) -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout("a")
    if reason == "others":
        await store.update_worker("Guest-0")
    looks = 0

    def gone() -> bool:
        nonlocal looks
        looks += 1
        return reason == "others"

    async def working_on(store: LightningStore, event: Any) -> None:
        while looks < 5:
            await asyncio.sleep(0.01)

    await attend(working_on, store, gone=gone)

    assert looks >= 5


class WaitingRun:
    """An algorithm that waits for ever, with a run whose rollouts name it."""

    run_id = "run-of-ours"

    async def __call__(self, store: LightningStore, event: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("ours", ["failed", "queuing"])
async def test_only_a_queue_of_its_own_ends_an_algorithm(ours: Any) -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout("theirs")
    rollout = await store.enqueue_rollout("ours", metadata={"run_id": WaitingRun.run_id})
    await store.update_rollout(rollout.rollout_id, status=ours)

    guarded = OrphanedQueueGuard(WaitingRun(), lambda: True, None, 0.02)(store, ThreadingEvent())

    with pytest.raises(TrainingError if ours == "queuing" else asyncio.TimeoutError):
        await asyncio.wait_for(guarded, LONG_SECONDS if ours == "queuing" else 0.3)
