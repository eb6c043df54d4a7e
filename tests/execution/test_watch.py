"""An algorithm that waits for rollouts which nobody will run is ended, and told why."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.errors import TrainingError
from agentlightning.execution import ThreadingEvent, watch
from agentlightning.execution.watch import PlacedRunners, Watch
from agentlightning.store import InMemoryLightningStore, LightningStore
from tests.runner.working import until

LONG_SECONDS = 30.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)


async def waiting_for_ever(store: LightningStore, event: Any) -> None:
    await asyncio.Event().wait()


async def run_watched(algorithm: Any, store: LightningStore, runners: PlacedRunners, **options: float) -> None:
    stop = ThreadingEvent()
    async with Watch(algorithm, store, stop, runners, **options):
        await algorithm(store, stop)


async def attend(algorithm: Any, store: LightningStore, *, gone: Callable[[], bool] = lambda: True) -> None:
    runners = PlacedRunners(gone, "Worker-0".__eq__)
    await asyncio.wait_for(run_watched(algorithm, store, runners), LONG_SECONDS)


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

    watched = run_watched(WaitingRun(), store, PlacedRunners(lambda: True))

    with pytest.raises(TrainingError if ours == "queuing" else asyncio.TimeoutError):
        await asyncio.wait_for(watched, LONG_SECONDS if ours == "queuing" else 0.3)


# ---------------------------------------------------------------------- workers that others placed


def waiting_for_a_rollout(store: LightningStore, lease_seconds: float) -> "asyncio.Task[None]":
    """An algorithm that enqueues a rollout and waits for it without end, whose workers are placed by others."""

    async def algorithm(store: LightningStore, event: Any) -> None:
        rollout = await store.enqueue_rollout("task", rollout_id="r")
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    return asyncio.create_task(run_watched(algorithm, store, PlacedRunners(), lease_seconds=lease_seconds))


async def test_a_training_whose_workers_are_all_gone_ends_with_an_error() -> None:
    store = InMemoryLightningStore()
    running = waiting_for_a_rollout(store, lease_seconds=0.4)
    await until(lambda: store.get_rollout_by_id("r"))

    await store.update_worker("w", {})

    with pytest.raises(TrainingError, match="No worker is left"):
        await asyncio.wait_for(running, LONG_SECONDS)


@pytest.mark.parametrize("reason", ["no worker has come yet", "a worker without heartbeats is busy"])
async def test_a_training_waits_on_while_somebody_may_work_for_it(reason: str) -> None:
    store = InMemoryLightningStore()
    await store.update_worker("of an earlier training")
    running = waiting_for_a_rollout(store, lease_seconds=0.02)
    if "busy" in reason:
        assert await store.dequeue_rollout(worker_id="w", wait=LONG_SECONDS) is not None

    done, _ = await asyncio.wait([running], timeout=0.5)

    assert not done
    running.cancel()


async def test_a_training_says_that_no_worker_has_come_yet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "REMINDER_SECONDS", 0.05)
    running = waiting_for_a_rollout(InMemoryLightningStore(), lease_seconds=0.2)

    await until(lambda: caplog.text.count("No worker has come yet, and 1 rollouts wait for one.") >= 2)

    running.cancel()


async def test_the_work_of_runners_that_have_died_is_given_back_while_the_algorithm_runs() -> None:
    store, has_recovered = InMemoryLightningStore(), asyncio.Event()

    class Dying(PlacedRunners):
        async def recover(self, store: LightningStore) -> None:
            has_recovered.set()

    async def algorithm(store: LightningStore, event: Any) -> None:
        await has_recovered.wait()

    await asyncio.wait_for(run_watched(algorithm, store, Dying()), LONG_SECONDS)


async def test_an_algorithm_does_not_run_on_without_its_watch() -> None:
    class Broken(PlacedRunners):
        async def recover(self, store: LightningStore) -> None:
            raise OSError("the queue of deaths is gone")

    with pytest.raises(OSError, match="the queue of deaths is gone"):
        await asyncio.wait_for(run_watched(waiting_for_ever, InMemoryLightningStore(), Broken()), LONG_SECONDS)
