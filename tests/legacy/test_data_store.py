"""Tasks, results and resources of the v0.1 protocol over a store."""

import asyncio
import re
from typing import Any

import pytest

from agentlightning.legacy.data_store import ServerDataStore
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.types import RolloutLegacy, Task

UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
TIMEOUT_SECONDS = 60.0


@pytest.fixture
def data_store(clock: Any) -> ServerDataStore:
    """A data store whose time stands still."""
    return ServerDataStore(InMemoryLightningStore(clock=clock), task_timeout_seconds=TIMEOUT_SECONDS)


async def claimed(data_store: ServerDataStore) -> Task:
    task = await data_store.get_next_task()
    assert task is not None
    return task


async def test_a_task_has_an_id_of_the_old_form_and_all_its_fields(data_store: ServerDataStore, clock: Any) -> None:
    rollout_id = await data_store.add_task({"q": 1}, "train", "res-1", {"k": "v"})
    created = clock.now
    clock.advance(5.0)

    task = await claimed(data_store)

    assert re.fullmatch(f"rollout-{UUID4}", rollout_id)
    assert task == Task(
        rollout_id=rollout_id,
        input={"q": 1},
        mode="train",
        resources_id="res-1",
        create_time=created,
        last_claim_time=created + 5.0,
        num_claims=1,
        metadata={"k": "v"},
    )


async def test_a_task_without_resources_takes_the_latest_when_it_is_run(data_store: ServerDataStore) -> None:
    await data_store.publish_resources({})

    await data_store.add_task("hello")

    assert (await claimed(data_store)).resources_id is None


async def test_a_requeued_task_is_at_the_tail_and_keeps_its_claims(data_store: ServerDataStore) -> None:
    first, second = [await data_store.add_task(number) for number in range(2)]
    task = await claimed(data_store)

    await data_store.requeue_task(task)
    again = [await claimed(data_store), await claimed(data_store)]

    assert task.rollout_id == first
    assert [(task.rollout_id, task.num_claims) for task in again] == [(second, 1), (first, 2)]


async def test_a_task_of_an_earlier_server_can_be_requeued(data_store: ServerDataStore) -> None:
    await data_store.requeue_task(Task(rollout_id="rollout-old", input="hello", mode="val"))

    task = await claimed(data_store)

    assert (task.rollout_id, task.input, task.mode) == ("rollout-old", "hello", "val")


async def test_a_stale_task_goes_back_to_the_queue(data_store: ServerDataStore, clock: Any) -> None:
    await data_store.add_task("hello")
    first = await claimed(data_store)
    clock.advance(TIMEOUT_SECONDS)
    assert await data_store.get_next_task() is None
    clock.advance(0.1)

    await data_store.forget_stale_tasks()
    processing = data_store.get_processing_tasks()
    again = await claimed(data_store)

    assert processing == {}
    assert (again.rollout_id, again.num_claims) == (first.rollout_id, 2)
    assert again.last_claim_time == clock.now


async def test_a_task_is_never_given_up(data_store: ServerDataStore, clock: Any) -> None:
    await data_store.add_task("hello")

    for claims in range(1, 20):
        assert (await claimed(data_store)).num_claims == claims
        clock.advance(TIMEOUT_SECONDS + 1)


async def test_a_claim_that_stands_is_not_forgotten(data_store: ServerDataStore) -> None:
    await data_store.add_task("hello")
    task = await claimed(data_store)

    await data_store.forget_stale_tasks()

    assert data_store.get_processing_tasks() == {task.rollout_id: task}


async def test_a_late_result_counts_and_ends_the_second_claim(data_store: ServerDataStore, clock: Any) -> None:
    rollout_id = await data_store.add_task("hello")
    await claimed(data_store)
    clock.advance(TIMEOUT_SECONDS + 1)
    await claimed(data_store)

    await data_store.store_rollout(RolloutLegacy(rollout_id=rollout_id, final_reward=1.0))
    clock.advance(TIMEOUT_SECONDS + 1)

    assert await data_store.get_next_task() is None
    result = await data_store.retrieve_rollout(rollout_id)
    assert result is not None
    assert result.final_reward == 1.0


async def test_a_result_for_a_task_back_in_the_queue_takes_it_out(data_store: ServerDataStore, clock: Any) -> None:
    rollout_id = await data_store.add_task("hello")
    await claimed(data_store)
    clock.advance(TIMEOUT_SECONDS + 1)

    await data_store.store_rollout(RolloutLegacy(rollout_id=rollout_id))

    assert await data_store.get_next_task() is None


async def test_a_result_asked_for_twice_at_once_is_given_once(
    data_store: ServerDataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await data_store.store_rollout(RolloutLegacy(rollout_id="r", final_reward=1.0))
    find = data_store.store.get_rollout_by_id

    async def find_slowly(rollout_id: str) -> Any:
        found = await find(rollout_id)
        await asyncio.sleep(0)
        return found

    monkeypatch.setattr(data_store.store, "get_rollout_by_id", find_slowly)

    results = await asyncio.gather(*(data_store.retrieve_rollout("r") for _ in range(3)))

    assert [result is not None for result in results].count(True) == 1


async def test_reporting_again_replaces_the_result_also_of_one_that_was_retrieved(data_store: ServerDataStore) -> None:
    rollout_id = await data_store.add_task("hello")
    rewards = []
    for reported in ((0.0, 1.0), (2.0,)):
        for reward in reported:
            await data_store.store_rollout(RolloutLegacy(rollout_id=rollout_id, final_reward=reward))
        result = await data_store.retrieve_rollout(rollout_id)
        rewards.append(None if result is None else result.final_reward)

    assert rewards == [1.0, 2.0]


async def test_all_results_are_retrieved_in_the_order_of_their_end(data_store: ServerDataStore, clock: Any) -> None:
    rollout_ids = [await data_store.add_task(number) for number in range(3)]
    for rollout_id in reversed(rollout_ids[1:]):
        clock.advance(1.0)
        await data_store.store_rollout(RolloutLegacy(rollout_id=rollout_id))

    results = await data_store.retrieve_completed_rollouts()

    assert [result.rollout_id for result in results] == [rollout_ids[2], rollout_ids[1]]
    assert await data_store.retrieve_completed_rollouts() == []


async def test_a_retrieved_result_no_longer_takes_memory(data_store: ServerDataStore) -> None:
    rollout_id = await data_store.add_task("hello")
    await data_store.store_rollout(RolloutLegacy(rollout_id=rollout_id, logs=["x" * 1000]))

    await data_store.retrieve_rollout(rollout_id)

    attempt = await data_store.store.get_latest_attempt(rollout_id)
    assert attempt is not None
    assert attempt.metadata == {"agentlightning.legacy.retrieved": True}


async def test_a_restarted_server_goes_on_where_the_last_one_stopped(tmp_path: Any) -> None:
    path = tmp_path / "legacy.db"
    async with SqliteLightningStore(path) as store:
        before = ServerDataStore(store)
        retrieved, reported, queued = [await before.add_task(number) for number in range(3)]
        for rollout_id in (retrieved, reported):
            await before.get_next_task()
            await before.store_rollout(RolloutLegacy(rollout_id=rollout_id, logs=[rollout_id]))
        await before.retrieve_rollout(retrieved)

    async with SqliteLightningStore(path) as store:
        after = ServerDataStore(store)
        task = await after.get_next_task()
        results = await after.retrieve_completed_rollouts()

    assert task is not None
    assert task.rollout_id == queued
    assert results == [RolloutLegacy(rollout_id=reported, logs=[reported])]
