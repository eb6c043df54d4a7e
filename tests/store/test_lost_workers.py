"""How long workers may be silent: the setting, and that nothing but a waiter is needed to find out."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agentlightning.types import RolloutConfig

FAR_SECONDS = 60.0

STORES: dict[str, Any] = {
    "memory": lambda folder, **options: InMemoryLightningStore(**options),
    "sqlite": lambda folder, **options: SqliteLightningStore(folder / "s.db", **options),
}


@pytest.fixture(params=STORES)
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return lambda **options: STORES[request.param](tmp_path, **options)


async def claimed_and_silent(store: LightningStore) -> str:
    rollout = await store.enqueue_rollout("task", config=RolloutConfig(requeue_lost=False))
    await store.dequeue_rollout("w", heartbeat_interval=0.01)
    return rollout.rollout_id


async def test_who_only_waits_or_subscribes_learns_of_a_lost_worker(make_store: Any) -> None:
    store = make_store(lost_worker_seconds=0.3)
    rollout_id = await claimed_and_silent(store)
    notices = store.subscribe(["worker"])

    async def until_gone() -> str | None:
        async for notice in notices:
            if notice.status == "unknown":
                return notice.name
        return None

    name = await asyncio.wait_for(until_gone(), FAR_SECONDS)
    other = await claimed_and_silent(store)
    finished = await asyncio.wait_for(store.wait_for_rollouts(rollout_ids=[rollout_id, other]), FAR_SECONDS)
    await store.close()

    assert (name, [rollout.status for rollout in finished]) == ("w", ["failed", "failed"])


async def test_leases_count_anew_when_a_store_is_opened(tmp_path: Path, clock: Any) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", clock=clock) as store:
        rollout_id = await claimed_and_silent(store)
    clock.advance(10_000)

    async with SqliteLightningStore(tmp_path / "s.db", clock=clock) as store:
        statuses = [(await store.get_rollout_by_id(rollout_id)).status]
        for seconds in (300, 1):
            clock.advance(seconds)
            statuses.append((await store.get_rollout_by_id(rollout_id)).status)

    assert statuses == ["preparing", "preparing", "failed"]


async def test_leases_count_anew_when_the_process_was_stopped(make_store: Any, clock: Any) -> None:
    store = make_store(clock=clock)
    rollout_id = await claimed_and_silent(store)
    await store.get_rollout_by_id(rollout_id)
    clock.advance(1000)
    store._watch._last_tick = (0.0, 0.0)  # as after a stop: the last tick was long ago

    statuses = [(await store.get_rollout_by_id(rollout_id)).status]
    clock.advance(301)
    statuses.append((await store.get_rollout_by_id(rollout_id)).status)
    await store.close()

    assert statuses == ["preparing", "failed"]


def test_time_that_is_not_positive_is_refused() -> None:
    for seconds in (0, -1, math.nan):
        with pytest.raises(ConfigurationError, match="lost_worker_seconds is"):
            InMemoryLightningStore(lost_worker_seconds=seconds)


async def test_workers_of_an_endlessly_patient_store_are_never_lost(make_store: Any, clock: Any) -> None:
    store = make_store(lost_worker_seconds=math.inf, clock=clock)
    rollout_id = await claimed_and_silent(store)

    for _ in range(100):
        clock.advance(100)
        await store.query_workers(limit=0)
    rollout = await store.get_rollout_by_id(rollout_id)
    await store.close()

    assert rollout.status == "preparing"


async def test_reading_alone_does_not_write_to_the_file(tmp_path: Path, clock: Any) -> None:
    async with SqliteLightningStore(tmp_path / "s.db", clock=clock) as store:
        await store.update_worker("w", {})
        before = store._work().writer._commits

        for _ in range(9):
            clock.advance(30)
            await store.query_workers()

        assert store._work().writer._commits == before
