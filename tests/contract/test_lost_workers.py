"""Heartbeats that name what a worker works on, and workers that fall silent, over every back end."""

from typing import Any

from agentlightning.store import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, RolloutConfig
from tests.contract.conftest import known

LOST_SECONDS = 300.0
STEP_SECONDS = 30.0
"""How often the store is used, so that it does not count as asleep."""


async def pass_time(store: LightningStore, clock: Any, seconds: float, *alive: str) -> None:
    """Let time go by while the store is in use and some workers live."""
    while seconds > 0:
        clock.advance(min(STEP_SECONDS, seconds))
        seconds -= STEP_SECONDS
        for worker_id in alive:
            await store.update_worker(worker_id, {})
        await store.query_workers(limit=0)


async def claimed(store: LightningStore, worker_id: str, **config: Any) -> str:
    rollout = await store.enqueue_rollout("task", config=RolloutConfig(**config))
    assert known(await store.dequeue_rollout(worker_id=worker_id)).rollout_id == rollout.rollout_id
    return rollout.rollout_id


async def status_of(store: LightningStore, rollout_id: str) -> str:
    return known(await store.get_rollout_by_id(rollout_id)).status


async def attempts_of(store: LightningStore, rollout_id: str) -> list[Attempt]:
    return list(await store.query_attempts(rollout_id))


async def test_worker_that_falls_silent_loses_its_claim(store: LightningStore, clock: Any) -> None:
    await store.update_worker("w", {})
    rollout_id = await claimed(store, "w")

    await pass_time(store, clock, LOST_SECONDS)
    before = await status_of(store, rollout_id)
    await pass_time(store, clock, STEP_SECONDS)

    assert (before, await status_of(store, rollout_id)) == ("preparing", "requeuing")
    (attempt,) = await attempts_of(store, rollout_id)
    error = (attempt.metadata or {})["error"]
    assert (attempt.status, error["type"]) == ("unresponsive", "WorkerLost")
    assert "worker w has been silent for 330 s" in error["message"]
    gone = known(await store.get_worker_by_id("w"))
    assert (gone.status, gone.current_attempt_id) == ("unknown", None)


async def test_worker_that_gives_no_heartbeats_is_never_lost(store: LightningStore, clock: Any) -> None:
    rollout_id = await claimed(store, "w")
    await pass_time(store, clock, 10 * LOST_SECONDS)
    assert await status_of(store, rollout_id) == "preparing"


async def test_worker_that_beats_rarely_may_miss_three_beats(store: LightningStore, clock: Any) -> None:
    await store.update_worker("w", {"interval_seconds": 200})
    rollout_id = await claimed(store, "w")

    await pass_time(store, clock, 2 * LOST_SECONDS)
    before = await status_of(store, rollout_id)
    await pass_time(store, clock, STEP_SECONDS)

    assert (before, await status_of(store, rollout_id)) == ("preparing", "requeuing")


async def test_silence_while_the_store_slept_does_not_count(store: LightningStore, clock: Any) -> None:
    await store.update_worker("w", {})
    rollout_id = await claimed(store, "w")

    clock.advance(10 * LOST_SECONDS)
    after_sleep = await status_of(store, rollout_id)
    await pass_time(store, clock, LOST_SECONDS)
    before = await status_of(store, rollout_id)
    await pass_time(store, clock, STEP_SECONDS)

    assert (after_sleep, before) == ("preparing", "preparing")
    assert await status_of(store, rollout_id) == "requeuing"


async def test_lost_attempts_do_not_count_as_tried(store: LightningStore, clock: Any) -> None:
    await store.update_worker("w", {})
    rollout_id = await claimed(store, "w", max_attempts=2, retry_condition=["failed"])
    await store.mark_worker_lost("w", "it died")

    outcomes = []
    for _ in range(2):
        claim = known(await store.dequeue_rollout(worker_id="v"))
        await store.update_attempt(rollout_id, claim.attempt.attempt_id, status="failed")
        outcomes.append(await status_of(store, rollout_id))

    assert outcomes == ["requeuing", "failed"]


async def test_lost_attempt_that_succeeds_after_another_was_begun_stays_lost(store: LightningStore) -> None:
    rollout_id = await claimed(store, "w")
    (late,) = await attempts_of(store, rollout_id)
    await store.mark_worker_lost("w", "its node is gone")
    claim = known(await store.dequeue_rollout(worker_id="v"))

    await store.finish_attempt(rollout_id, claim.attempt.attempt_id, "succeeded")
    await store.finish_attempt(rollout_id, late.attempt_id, "succeeded")

    assert [attempt.status for attempt in await attempts_of(store, rollout_id)] == ["unresponsive", "succeeded"]


async def test_lost_attempt_that_succeeds_before_another_is_begun_counts(store: LightningStore) -> None:
    rollout_id = await claimed(store, "w")
    (late,) = await attempts_of(store, rollout_id)
    await store.mark_worker_lost("w", "its node is out of reach")

    await store.finish_attempt(rollout_id, late.attempt_id, "succeeded")

    assert await store.dequeue_rollout(worker_id="v") is None
    assert [attempt.status for attempt in await attempts_of(store, rollout_id)] == ["succeeded"]


async def test_rollout_may_be_lost_three_times(store: LightningStore) -> None:
    rollout_id = await claimed(store, "w-0")

    outcomes = []
    for number in range(4):
        assert list(await store.mark_worker_lost(f"w-{number}", "it died")) == [rollout_id]
        outcomes.append(await status_of(store, rollout_id))
        await store.dequeue_rollout(worker_id=f"w-{number + 1}")

    assert outcomes == ["requeuing", "requeuing", "requeuing", "failed"]


async def test_loss_is_an_unresponsive_attempt_where_requeueing_is_switched_off(store: LightningStore) -> None:
    once = await claimed(store, "w", requeue_lost=False)
    twice = await claimed(store, "w", requeue_lost=False, max_attempts=2, retry_condition=["unresponsive"])
    await store.mark_worker_lost("w", "it died")
    assert (await status_of(store, once), await status_of(store, twice)) == ("failed", "requeuing")


async def test_worker_that_comes_back_works_on(store: LightningStore, clock: Any, make_span: Any) -> None:
    await store.update_worker("w", {})
    rollout = await store.start_rollout("task", worker_id="w")
    await pass_time(store, clock, LOST_SECONDS + STEP_SECONDS)

    await store.add_span(make_span(rollout))

    assert await status_of(store, rollout.rollout_id) == "running"
    (attempt,) = await attempts_of(store, rollout.rollout_id)
    assert attempt.status == "running"


async def test_worker_that_comes_back_and_claims_can_be_lost_again(store: LightningStore, clock: Any) -> None:
    await store.update_worker("w", {})
    rollout_id = await claimed(store, "w")
    await pass_time(store, clock, LOST_SECONDS + STEP_SECONDS)
    await store.update_worker("w", {})
    assert await store.dequeue_rollout(worker_id="w") is not None

    await pass_time(store, clock, LOST_SECONDS + STEP_SECONDS)

    assert [attempt.status for attempt in await attempts_of(store, rollout_id)] == ["unresponsive"] * 2
    assert await status_of(store, rollout_id) == "requeuing"


async def test_marking_a_worker_lost_leaves_what_it_has_ended_alone(store: LightningStore) -> None:
    ended, open_id = await claimed(store, "w"), await claimed(store, "w")
    await store.update_attempt(ended, "latest", status="succeeded")

    lost = await store.mark_worker_lost("w", "it died")
    again = await store.mark_worker_lost("w", "it died")

    assert (list(lost), list(again)) == ([open_id], [])
    assert await status_of(store, ended) == "succeeded"


async def test_all_claims_of_a_lost_worker_are_given_back_and_taken_by_another(
    store: LightningStore, clock: Any
) -> None:
    await store.update_worker("w", {})
    ids = [await claimed(store, "w") for _ in range(3)]
    others = await claimed(store, "v")

    await pass_time(store, clock, LOST_SECONDS + STEP_SECONDS, "v")

    assert [await status_of(store, rollout_id) for rollout_id in ids] == ["requeuing"] * 3
    assert await status_of(store, others) == "preparing"
    again = await store.dequeue_many_rollouts(limit=4, worker_id="v")
    assert [(claim.rollout_id, claim.attempt.sequence_id) for claim in again] == [(each, 2) for each in ids]


# ---------------------------------------------------------------------- heartbeats that name attempts

SILENCE = RolloutConfig(unresponsive_seconds=10)


def naming(*rollouts: AttemptedRollout) -> dict[str, Any]:
    return {"running_attempts": [[rollout.rollout_id, rollout.attempt.attempt_id] for rollout in rollouts]}


async def seen(store: LightningStore, rollout: AttemptedRollout) -> Attempt:
    return known(await store.get_latest_attempt(rollout.rollout_id))


async def test_attempt_is_not_given_up_while_its_worker_names_it(store: LightningStore, clock: Any) -> None:
    named = await store.start_rollout("a", config=SILENCE, worker_id="w")
    unnamed = await store.start_rollout("b", config=SILENCE, worker_id="w")

    for _ in range(3):
        clock.advance(8)
        await store.update_worker("w", naming(named))

    assert ((await seen(store, named)).status, (await seen(store, unnamed)).status) == ("running", "unresponsive")
    assert (await seen(store, named)).last_heartbeat_time == clock()
    assert await status_of(store, named.rollout_id) == "running"
    clock.advance(11)
    await store.update_worker("w", {"cpu": 0.5})
    assert (await seen(store, named)).status == "unresponsive"


async def test_attempt_of_another_worker_or_one_that_has_ended_or_was_replaced_is_left_alone(
    store: LightningStore,
) -> None:
    others = await store.start_rollout("a", config=SILENCE, worker_id="v")
    ended, first = await store.start_rollout("b", worker_id="w"), await store.start_rollout("c", worker_id="w")
    await store.finish_attempt(ended.rollout_id, ended.attempt.attempt_id, "succeeded")
    await store.start_attempt(first.rollout_id, worker_id="w")
    before = await seen(store, ended)

    await store.update_worker("w", naming(others, ended, first))

    assert (await seen(store, others)).last_heartbeat_time is None
    assert await seen(store, ended) == before
    assert [attempt.status for attempt in await store.query_attempts(first.rollout_id)] == ["preparing", "preparing"]


async def test_anything_else_under_that_name_is_only_kept(store: LightningStore) -> None:
    for named in ("text", 1, None, [1], [["a"]], [["a", 1]], {"a": "b"}, [["ro-none", "at-none"]]):
        worker = await store.update_worker("w", {"running_attempts": named})
        assert worker.heartbeat_stats == {"running_attempts": named}
