"""Claims that go back to the queue because nothing was begun with them, over every back end."""

import asyncio
from typing import Any

from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, RolloutConfig, Span


def ids_of(*rollouts: AttemptedRollout) -> list[tuple[str, str]]:
    return [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in rollouts]


async def claimed(store: LightningStore, count: int, **options: Any) -> list[AttemptedRollout]:
    return [claim.rollout for claim in await store.claim_rollouts(limit=count, **options)]


async def test_returned_claims_are_at_the_head_of_the_queue_in_their_order(store: LightningStore) -> None:
    for n in range(4):
        await store.enqueue_rollout(n)
    held = await claimed(store, 3)

    assert list(await store.return_claims(ids_of(*held[1:]))) == [True, True]

    again = await claimed(store, 4)
    assert [rollout.input for rollout in again] == [1, 2, 3]
    assert [rollout.attempt.sequence_id for rollout in again] == [1, 1, 1]


async def test_returned_rollout_is_as_it_was_before_its_claim(store: LightningStore) -> None:
    queued = await store.enqueue_rollout("a", config=RolloutConfig(timeout_seconds=5.0))
    (held,) = await claimed(store, 1, worker_id="w")

    await store.return_claims(ids_of(held))

    rollout = await store.get_rollout_by_id(queued.rollout_id)
    assert rollout is not None
    assert (rollout.status, rollout.end_time, rollout.config) == ("queuing", None, queued.config)
    assert list(await store.query_attempts(queued.rollout_id)) == []
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("idle", None)


async def test_returned_retry_keeps_the_attempts_before_it(store: LightningStore) -> None:
    await store.enqueue_rollout("a", config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    (first,) = await claimed(store, 1)
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="failed")
    (second,) = await claimed(store, 1)

    assert list(await store.return_claims(ids_of(second))) == [True]

    rollout = await store.get_rollout_by_id(first.rollout_id)
    assert rollout is not None
    assert rollout.status == "requeuing"
    (third,) = await claimed(store, 1)
    assert (third.attempt.sequence_id, third.attempt.attempt_id != first.attempt.attempt_id) == (2, True)


async def test_what_has_begun_or_is_over_or_unknown_is_left_alone(store: LightningStore) -> None:
    for n in range(3):
        await store.enqueue_rollout(n)
    running, ended, replaced = await claimed(store, 3)
    owner: Any = dict(zip(("rollout_id", "attempt_id"), ids_of(running)[0], strict=True))
    await store.add_span(Span.from_attributes(attributes={}, sequence_id=1, name="s", **owner))
    await store.update_attempt(*ids_of(ended)[0], status="succeeded")
    later = await store.start_attempt(replaced.rollout_id)

    answers = await store.return_claims([*ids_of(running, ended, replaced), ("ro-none", "at-none")])

    assert list(answers) == [False] * 4
    assert await store.claim_rollouts() == []
    for rollout, attempt in ((running, running.attempt), (ended, ended.attempt), (replaced, later.attempt)):
        latest = await store.get_latest_attempt(rollout.rollout_id)
        assert latest is not None
        assert latest.attempt_id == attempt.attempt_id


async def test_returned_claim_wakes_who_waits_for_work(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    (held,) = await claimed(store, 1)
    waiting = asyncio.create_task(store.claim_rollouts(wait=30.0, worker_id="other"))
    await asyncio.sleep(0)

    await store.return_claims(ids_of(held))

    (claim,) = await asyncio.wait_for(waiting, 20)
    assert (claim.rollout.input, claim.rollout.attempt.worker_id) == ("a", "other")
