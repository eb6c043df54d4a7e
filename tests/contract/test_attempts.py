"""Attempts, retries and the watchdog, over every back end."""

import asyncio
import time
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import RolloutConfig
from tests.contract.conftest import known


async def status_of(store: LightningStore, rollout_id: str) -> tuple[str, str]:
    rollout = known(await store.get_rollout_by_id(rollout_id))
    return rollout.status, known(await store.get_latest_attempt(rollout_id)).status


async def test_attempts_count_upwards_and_are_sorted_and_paged(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    await store.start_attempt(rollout.rollout_id, worker_id="w")
    third = await store.start_attempt(rollout.rollout_id)

    attempts = await store.query_attempts(rollout.rollout_id)
    page = await store.query_attempts(rollout.rollout_id, sort_order="desc", limit=1, offset=1)

    assert [a.sequence_id for a in attempts] == [1, 2, 3]
    assert attempts[1].worker_id == "w"
    assert await store.get_latest_attempt(rollout.rollout_id) == third.attempt == attempts[2]
    assert ([a.sequence_id for a in page], page.total) == ([2], 3)
    with pytest.raises(InvalidQuery):
        await store.query_attempts(rollout.rollout_id, sort_by="metadata")


async def test_outcome_of_the_attempt_decides_the_rollout(store: LightningStore, clock: Any) -> None:
    outcomes: dict[Any, str] = {"succeeded": "succeeded", "failed": "failed", "timeout": "failed"}
    for outcome, expected in outcomes.items():
        rollout = await store.start_rollout("a")
        clock.advance(3)

        attempt = await store.update_attempt(rollout.rollout_id, "latest", status=outcome)

        assert (attempt.status, attempt.end_time) == (outcome, clock.now)
        assert await status_of(store, rollout.rollout_id) == (expected, outcome)


async def test_failed_attempt_is_retried_up_to_the_limit(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.enqueue_rollout("a", config=config)
    await store.enqueue_rollout("b")

    first = known(await store.dequeue_rollout())
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="failed")
    assert (await status_of(store, rollout.rollout_id))[0] == "requeuing"
    assert known(await store.dequeue_rollout()).input == "b"
    second = known(await store.dequeue_rollout())
    assert (second.rollout_id, second.attempt.sequence_id) == (rollout.rollout_id, 2)
    await store.update_attempt(second.rollout_id, second.attempt.attempt_id, status="failed")

    assert (await status_of(store, rollout.rollout_id))[0] == "failed"
    assert await store.dequeue_rollout() is None


async def test_older_attempt_changes_only_itself(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    await store.start_attempt(rollout.rollout_id)
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
    assert await status_of(store, rollout.rollout_id) == ("preparing", "preparing")


async def test_cancelled_rollout_stays_cancelled(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    await store.update_rollout(rollout.rollout_id, status="cancelled")

    await store.update_attempt(rollout.rollout_id, "latest", worker_id="w", metadata={"k": 1})
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")

    assert await status_of(store, rollout.rollout_id) == ("cancelled", "succeeded")


async def test_wrong_ids_and_statuses_are_refused(store: LightningStore) -> None:
    queued = await store.enqueue_rollout("a")
    started = await store.start_rollout("b")

    with pytest.raises(NotFound, match="Rollout nope not found"):
        await store.update_attempt("nope", "latest", status="failed")
    with pytest.raises(NotFound, match="No attempts found"):
        await store.update_attempt(queued.rollout_id, "latest", status="failed")
    with pytest.raises(NotFound, match="Attempt at-x not found"):
        await store.update_attempt(started.rollout_id, "at-x", status="failed")
    with pytest.raises(InvalidValue, match="'cancelled' is not an attempt status"):
        await store.update_attempt(started.rollout_id, "latest", status="cancelled")  # type: ignore[arg-type]
    assert await status_of(store, started.rollout_id) == ("preparing", "preparing")


async def test_attempt_that_takes_too_long_times_out(store: LightningStore, clock: Any) -> None:
    rollout = await store.start_rollout("a", config=RolloutConfig(timeout_seconds=10))

    clock.advance(10)
    assert await status_of(store, rollout.rollout_id) == ("preparing", "preparing")
    clock.advance(0.5)
    assert await status_of(store, rollout.rollout_id) == ("failed", "timeout")
    assert known(await store.get_latest_attempt(rollout.rollout_id)).end_time == clock.now


async def test_heartbeats_and_spans_keep_an_attempt_responsive(
    store: LightningStore, clock: Any, make_span: Any
) -> None:
    rollout = await store.start_rollout("a", config=RolloutConfig(unresponsive_seconds=5))

    for _ in range(3):
        clock.advance(4)
        await store.add_span(make_span(rollout))
        clock.advance(4)
        await store.update_attempt(rollout.rollout_id, "latest", last_heartbeat_time=clock.now)

    assert await status_of(store, rollout.rollout_id) == ("running", "running")
    clock.advance(5.5)
    assert await status_of(store, rollout.rollout_id) == ("failed", "unresponsive")
    await store.add_span(make_span(rollout))  # too late
    assert await status_of(store, rollout.rollout_id) == ("failed", "unresponsive")


async def test_a_heartbeat_set_back_counts_against_the_attempt(
    store: LightningStore, clock: Any, make_span: Any
) -> None:
    rollout = await store.start_rollout("a", config=RolloutConfig(unresponsive_seconds=5))
    await store.add_span(make_span(rollout))
    await store.update_attempt(rollout.rollout_id, "latest", last_heartbeat_time=clock.now - 60)
    assert await status_of(store, rollout.rollout_id) == ("failed", "unresponsive")


async def test_heartbeat_makes_a_preparing_attempt_running(store: LightningStore, clock: Any) -> None:
    rollout = await store.start_rollout("a")
    await store.update_attempt(rollout.rollout_id, "latest", last_heartbeat_time=clock.now)
    assert await status_of(store, rollout.rollout_id) == ("running", "running")


async def test_span_revives_an_unresponsive_attempt_and_takes_it_out_of_the_queue(
    store: LightningStore, clock: Any, make_span: Any
) -> None:
    config = RolloutConfig(unresponsive_seconds=5, max_attempts=3, retry_condition=["unresponsive"])
    rollout = await store.start_rollout("a", config=config)
    clock.advance(6)
    assert await status_of(store, rollout.rollout_id) == ("requeuing", "unresponsive")

    await store.add_span(make_span(rollout))

    assert await status_of(store, rollout.rollout_id) == ("running", "running")
    assert await store.dequeue_rollout() is None
    assert known(await store.get_latest_attempt(rollout.rollout_id)).end_time is None


async def test_who_only_waits_is_woken_by_a_timeout_and_by_a_retry_after_silence(store: LightningStore) -> None:
    inner: Any = getattr(store, "store", store)
    inner._clock = time.time
    slow = await store.start_rollout("a", config=RolloutConfig(timeout_seconds=0.05))

    finished = await asyncio.wait_for(store.wait_for_rollouts([slow.rollout_id], timeout=None), 10)
    config = RolloutConfig(unresponsive_seconds=0.05, max_attempts=2, retry_condition=["unresponsive"])
    silent = await store.start_rollout("a", config=config)
    claimed = known(await asyncio.wait_for(store.dequeue_rollout(wait=30), 10))

    assert [r.status for r in finished] == ["failed"]
    assert (claimed.rollout_id, claimed.attempt.sequence_id) == (silent.rollout_id, 2)
    assert (await store.query_attempts(silent.rollout_id))[0].status == "unresponsive"
