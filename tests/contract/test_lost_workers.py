"""Leases: heartbeats that name what a worker works on, and workers that fall silent, over every back end."""

from typing import Any

from agentlightning.store import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, RolloutConfig
from tests.contract.conftest import known

LEASE_SECONDS = 300.0
BEAT_SECONDS = 10.0


def naming(*rollouts: AttemptedRollout) -> dict[str, Any]:
    return {
        "interval_seconds": BEAT_SECONDS,
        "running_attempts": [[rollout.rollout_id, rollout.attempt.attempt_id] for rollout in rollouts],
    }


async def leased(store: LightningStore, worker_id: str, interval: float = BEAT_SECONDS, **config: Any) -> Any:
    """A rollout that a worker with heartbeats has claimed."""
    rollout = await store.enqueue_rollout("task", config=RolloutConfig(**config))
    claim = known(await store.dequeue_rollout(worker_id=worker_id, heartbeat_interval=interval))
    assert claim.rollout_id == rollout.rollout_id
    return claim


async def claimed(store: LightningStore, worker_id: str, **config: Any) -> str:
    return (await leased(store, worker_id, **config)).rollout_id


async def status_of(store: LightningStore, rollout_id: str) -> str:
    return known(await store.get_rollout_by_id(rollout_id)).status


async def attempts_of(store: LightningStore, rollout_id: str) -> list[Attempt]:
    return list(await store.query_attempts(rollout_id))


async def test_worker_that_falls_silent_loses_its_claim(store: LightningStore, clock: Any) -> None:
    await store.update_worker("w", {})
    rollout_id = await claimed(store, "w")

    clock.advance(LEASE_SECONDS)
    before = await status_of(store, rollout_id)
    clock.advance(1)

    assert (before, await status_of(store, rollout_id)) == ("preparing", "requeuing")
    (attempt,) = await attempts_of(store, rollout_id)
    error = (attempt.metadata or {})["error"]
    assert (attempt.status, error["type"]) == ("unresponsive", "WorkerLost")
    assert "worker w has been silent for 301 s" in error["message"]
    gone = known(await store.get_worker_by_id("w"))
    assert (gone.status, gone.current_attempt_id) == ("unknown", None)


async def test_lease_lasts_as_long_as_heartbeats_name_the_attempt(store: LightningStore, clock: Any) -> None:
    named, unnamed = await leased(store, "w"), await leased(store, "w")

    for _ in range(4):
        clock.advance(LEASE_SECONDS / 2)
        answer = await store.update_worker("w", naming(named))

    assert answer.lost_attempts == []
    assert await status_of(store, named.rollout_id) == "running"
    assert await status_of(store, unnamed.rollout_id) == "requeuing"


async def test_spans_renew_no_lease(store: LightningStore, clock: Any, make_span: Any) -> None:
    claim = await leased(store, "w")
    clock.advance(LEASE_SECONDS - 1)
    await store.add_span(make_span(claim))
    clock.advance(2)

    assert await status_of(store, claim.rollout_id) == "requeuing"


async def test_claims_of_workers_without_heartbeats_and_started_rollouts_have_no_lease(
    store: LightningStore, clock: Any
) -> None:
    silent = await claimed(store, "w", interval=0)
    nameless = await store.enqueue_rollout("task")
    await store.dequeue_rollout(heartbeat_interval=BEAT_SECONDS)
    started = await store.start_rollout("task", worker_id="v")
    await store.update_worker("v", naming(started))

    clock.advance(10 * LEASE_SECONDS)

    ids = (silent, nameless.rollout_id, started.rollout_id)
    assert [await status_of(store, each) for each in ids] == ["preparing", "preparing", "running"]


async def test_worker_that_beats_rarely_may_miss_three_beats(store: LightningStore, clock: Any) -> None:
    rollout_id = await claimed(store, "w", interval=200)

    clock.advance(600)
    before = await status_of(store, rollout_id)
    clock.advance(1)

    assert (before, await status_of(store, rollout_id)) == ("preparing", "requeuing")


async def test_time_that_has_run_out_is_decided_before_the_lease(store: LightningStore, clock: Any) -> None:
    rollout_id = await claimed(store, "w", timeout_seconds=LEASE_SECONDS)
    clock.advance(LEASE_SECONDS + 1)

    assert await status_of(store, rollout_id) == "failed"
    assert [attempt.status for attempt in await attempts_of(store, rollout_id)] == ["timeout"]


async def test_lost_work_goes_to_the_tail_in_the_order_of_its_leases(store: LightningStore, clock: Any) -> None:
    later, earlier = await leased(store, "w"), await leased(store, "w")
    waiting = await store.enqueue_rollout("task")
    clock.advance(1)
    await store.update_worker("w", naming(later))
    clock.advance(LEASE_SECONDS + 1)

    again = await store.dequeue_many_rollouts(limit=4)

    assert [claim.rollout_id for claim in again] == [waiting.rollout_id, earlier.rollout_id, later.rollout_id]


async def test_heartbeat_tells_of_attempts_that_are_the_workers_no_more(store: LightningStore, clock: Any) -> None:
    lost = await leased(store, "w")
    clock.advance(1)
    cancelled, kept = await leased(store, "w"), await leased(store, "w")
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    clock.advance(LEASE_SECONDS + 1)

    given_up = await store.update_worker("w", naming(lost))
    another = await store.dequeue_rollout(worker_id="v")
    answer = await store.update_worker("w", naming(lost, cancelled, kept))

    assert known(another).rollout_id == lost.rollout_id
    assert given_up.lost_attempts == []  # it may still end before another begins
    expected = [(claim.rollout_id, claim.attempt.attempt_id) for claim in (lost, cancelled)]
    assert [tuple(pair) for pair in answer.lost_attempts] == expected


async def test_claim_without_a_lease_gets_one_with_the_next_heartbeat(store: LightningStore, clock: Any) -> None:
    await store.enqueue_rollout("task")
    claim = known(await store.dequeue_rollout(worker_id="w"))
    await store.update_worker("w", naming(claim))
    clock.advance(LEASE_SECONDS + 1)

    assert await status_of(store, claim.rollout_id) == "requeuing"


async def test_silent_worker_is_shown_as_unknown(store: LightningStore, clock: Any) -> None:
    await store.update_worker("w", {"interval_seconds": BEAT_SECONDS})
    assert await store.dequeue_rollout(worker_id="w") is None
    before = known(await store.get_worker_by_id("w")).status
    clock.advance(LEASE_SECONDS + 1)

    assert (before, known(await store.get_worker_by_id("w")).status) == ("idle", "unknown")
    assert [worker.worker_id for worker in await store.query_workers(status_in=["unknown"])] == ["w"]
    assert list(await store.query_workers(status_in=["idle"])) == []


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
    claim = await leased(store, "w")
    clock.advance(LEASE_SECONDS + 1)
    lost = await status_of(store, claim.rollout_id)

    await store.add_span(make_span(claim))

    assert (lost, await status_of(store, claim.rollout_id)) == ("requeuing", "running")
    assert await store.dequeue_rollout(worker_id="v") is None
    (attempt,) = await attempts_of(store, claim.rollout_id)
    assert attempt.status == "running"


async def test_worker_that_comes_back_and_claims_can_be_lost_again(store: LightningStore, clock: Any) -> None:
    rollout_id = await claimed(store, "w")
    clock.advance(LEASE_SECONDS + 1)
    assert await store.dequeue_rollout(worker_id="w", heartbeat_interval=BEAT_SECONDS) is not None

    clock.advance(LEASE_SECONDS + 1)

    assert await status_of(store, rollout_id) == "requeuing"
    assert [attempt.status for attempt in await attempts_of(store, rollout_id)] == ["unresponsive"] * 2


async def test_marking_a_worker_lost_leaves_what_it_has_ended_alone(store: LightningStore) -> None:
    ended, open_id = await claimed(store, "w"), await claimed(store, "w")
    await store.update_attempt(ended, "latest", status="succeeded")

    lost = await store.mark_worker_lost("w", "it died")
    again = await store.mark_worker_lost("w", "it died")

    assert (list(lost), list(again)) == ([open_id], [])
    assert await status_of(store, ended) == "succeeded"


# ---------------------------------------------------------------------- heartbeats that name attempts

SILENCE = RolloutConfig(unresponsive_seconds=10)


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
