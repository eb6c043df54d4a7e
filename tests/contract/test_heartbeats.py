"""Heartbeats that name what a worker works on, over every back end."""

from typing import Any

import pytest

from agentlightning.store import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, RolloutConfig

SILENCE = RolloutConfig(unresponsive_seconds=10)


def naming(*rollouts: AttemptedRollout) -> dict[str, Any]:
    return {"running_attempts": [[rollout.rollout_id, rollout.attempt.attempt_id] for rollout in rollouts]}


async def seen(store: LightningStore, rollout: AttemptedRollout) -> Attempt:
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    return attempt


async def test_attempt_that_its_worker_names_is_not_given_up(store: LightningStore, clock: Any) -> None:
    named = await store.start_rollout("a", config=SILENCE, worker_id="w")
    unnamed = await store.start_rollout("b", config=SILENCE, worker_id="w")

    for _ in range(3):
        clock.advance(8)
        await store.update_worker("w", naming(named))

    assert ((await seen(store, named)).status, (await seen(store, unnamed)).status) == ("running", "unresponsive")
    assert (await seen(store, named)).last_heartbeat_time == clock()
    rollout = await store.get_rollout_by_id(named.rollout_id)
    assert rollout is not None
    assert rollout.status == "running"


async def test_attempt_that_is_named_no_longer_is_given_up(store: LightningStore, clock: Any) -> None:
    rollout = await store.start_rollout("a", config=SILENCE, worker_id="w")
    await store.update_worker("w", naming(rollout))

    clock.advance(11)
    await store.update_worker("w", {"cpu": 0.5})

    assert (await seen(store, rollout)).status == "unresponsive"


async def test_attempt_of_another_worker_or_one_that_has_ended_is_left_alone(store: LightningStore) -> None:
    others = await store.start_rollout("a", config=SILENCE, worker_id="v")
    ended = await store.start_rollout("b", worker_id="w")
    await store.finish_attempt(ended.rollout_id, ended.attempt.attempt_id, "succeeded")
    before = await seen(store, ended)

    await store.update_worker("w", naming(others, ended))

    assert (await seen(store, others)).last_heartbeat_time is None
    assert await seen(store, ended) == before


async def test_attempt_that_was_replaced_is_left_alone(store: LightningStore) -> None:
    first = await store.start_rollout("a", worker_id="w")
    second = await store.start_attempt(first.rollout_id, worker_id="w")

    await store.update_worker("w", naming(first))

    assert (await seen(store, second)).status == "preparing"
    assert [attempt.status for attempt in await store.query_attempts(first.rollout_id)] == ["preparing", "preparing"]


@pytest.mark.parametrize("named", ["text", 1, None, [1], [["a"]], [["a", 1]], {"a": "b"}, [["ro-none", "at-none"]]])
async def test_anything_else_under_that_name_is_only_kept(store: LightningStore, named: Any) -> None:
    worker = await store.update_worker("w", {"running_attempts": named})

    assert worker.heartbeat_stats == {"running_attempts": named}
