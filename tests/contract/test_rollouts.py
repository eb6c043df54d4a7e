"""Rollouts and the queue, over every back end."""

import asyncio
from typing import Any, Literal

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import LLM, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig, Task
from tests.contract.conftest import known


async def finish(store: LightningStore, rollout: AttemptedRollout, status: Any = "succeeded") -> None:
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status)


async def test_started_rollout_is_preparing_with_its_first_attempt(store: LightningStore, clock: Any) -> None:
    started = await store.start_rollout({"q": 1}, "train", worker_id="w-1")

    assert (started.status, started.attempt.status, started.attempt.sequence_id) == ("preparing", "preparing", 1)
    assert started.start_time == started.attempt.start_time == clock.now
    assert started.attempt.worker_id == "w-1"
    assert started.metadata == {}
    assert await store.dequeue_rollout() is None
    ids = (started.rollout_id, started.attempt.attempt_id, (await store.add_resources({})).resources_id)
    assert [(each[:3], len(each)) for each in ids] == [("ro-", 15), ("at-", 11), ("rs-", 15)]


async def test_dequeue_many_claims_up_to_the_limit_in_order(store: LightningStore) -> None:
    queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(5)])

    first = await store.dequeue_many_rollouts(limit=3, worker_id="w")
    rest = await store.dequeue_many_rollouts(limit=10)

    assert [r.rollout_id for r in (*first, *rest)] == [r.rollout_id for r in queued]
    assert len(first) == 3
    assert await store.dequeue_many_rollouts(limit=2) == []
    with pytest.raises(InvalidQuery, match="limit is 0"):
        await store.dequeue_many_rollouts(limit=0)


async def test_enqueue_many_is_all_or_nothing(store: LightningStore) -> None:
    bad = EnqueueRolloutRequest.model_construct(
        input=2, mode="nonsense", resources_id=None, config=None, metadata=None, rollout_id=None
    )

    with pytest.raises(InvalidValue, match="mode"):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1), bad])

    assert await store.query_rollouts() == []
    assert await store.dequeue_rollout() is None


async def test_rollout_is_bound_to_the_latest_resources(store: LightningStore) -> None:
    unbound = await store.enqueue_rollout("a")
    published = await store.add_resources({"llm": LLM(endpoint="http://h", model="m")})

    assert unbound.resources_id is None
    assert (await store.enqueue_rollout("b")).resources_id == published.resources_id
    assert (await store.start_rollout("c", resources_id="elsewhere")).resources_id == "elsewhere"


async def test_rollout_skipped_in_queue_after_cancellation(store: LightningStore) -> None:
    cancelled = await store.enqueue_rollout("a")
    kept = await store.enqueue_rollout("b")
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    assert known(await store.dequeue_rollout()).rollout_id == kept.rollout_id


async def test_unknown_ids_answer_none_or_raise(store: LightningStore) -> None:
    assert await store.get_rollout_by_id("nope") is None
    assert await store.get_latest_attempt("nope") is None
    assert await store.query_attempts("nope") == []
    assert await store.query_spans("nope") == []
    with pytest.raises(NotFound, match="Rollout nope not found"):
        await store.start_attempt("nope")
    with pytest.raises(ValueError, match="Rollout nope not found"):
        await store.update_rollout("nope", status="failed")


async def test_update_replaces_only_given_fields_and_none_is_a_value(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout({"a": 1}, "train", "rs-1", RolloutConfig(max_attempts=3), {"m": 1})

    changed = await store.update_rollout(rollout.rollout_id, mode=None, metadata={"m": 2})
    cleared = await store.update_rollout(rollout.rollout_id, metadata=None, input=[1])

    assert (changed.mode, changed.metadata, changed.input) == (None, {"m": 2}, {"a": 1})
    assert (changed.resources_id, changed.config.max_attempts) == ("rs-1", 3)
    assert (cleared.metadata, cleared.input) == (None, [1])
    assert await store.get_rollout_by_id(rollout.rollout_id) == cleared


async def test_illegal_values_leave_the_rollout_untouched(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("a")

    with pytest.raises(InvalidValue, match="'bogus' is not a rollout status"):
        await store.update_rollout(rollout.rollout_id, status="bogus", mode="val")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="mode"):
        await store.update_rollout(rollout.rollout_id, mode="bogus")  # type: ignore[arg-type]

    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout


async def test_final_status_sets_the_end_and_leaving_it_clears_the_end(store: LightningStore, clock: Any) -> None:
    rollout = await store.enqueue_rollout("a")
    clock.advance(5)

    ended = await store.update_rollout(rollout.rollout_id, status="cancelled")
    revived = await store.start_attempt(rollout.rollout_id)

    assert ended.end_time == clock.now
    assert (revived.status, revived.end_time) == ("preparing", None)


async def test_requeued_rollout_goes_to_the_tail_once(store: LightningStore) -> None:
    first = await store.enqueue_rollout("a")
    second = await store.enqueue_rollout("b")
    await store.dequeue_rollout()

    await store.update_rollout(first.rollout_id, status="requeuing")
    await store.update_rollout(first.rollout_id, status="queuing")
    claimed = [await store.dequeue_rollout() for _ in range(3)]

    assert [c.rollout_id if c else None for c in claimed] == [second.rollout_id, first.rollout_id, None]


async def test_rollouts_with_attempts_come_back_with_the_latest(store: LightningStore) -> None:
    queued = await store.enqueue_rollout("a")
    started = await store.start_rollout("b")
    again = await store.start_attempt(started.rollout_id)

    page = await store.query_rollouts()

    assert type(page[0]) is Rollout
    assert page[0].rollout_id == queued.rollout_id
    assert isinstance(page[1], AttemptedRollout)
    assert page[1].attempt == again.attempt


async def test_filters_are_joined_by_and_or_by_or(store: LightningStore) -> None:
    a, b, c = [await store.enqueue_rollout(n, rollout_id=f"r-{n}") for n in "abc"]
    await store.update_rollout("r-c", status="failed")

    async def ids(**filters: Any) -> list[str]:
        return [r.rollout_id for r in await store.query_rollouts(**filters)]

    assert await ids(status=["queuing"]) == ["r-a", "r-b"]
    assert await ids(status_in=["queuing"], rollout_id_in=["r-b", "r-c"]) == ["r-b"]
    assert await ids(status_in=["failed"], rollout_ids=["r-a"], filter_logic="or") == ["r-a", "r-c"]
    assert await ids(rollout_id_contains="-b") == ["r-b"]
    assert await ids(status=[]) == []
    assert [a.status, b.status, c.status] == ["queuing"] * 3


async def test_rollouts_that_have_not_ended_come_after_those_that_have(store: LightningStore) -> None:
    *_, other = [await store.enqueue_rollout(n) for n in range(3)]
    await store.update_rollout(other.rollout_id, status="cancelled")

    async def inputs(order: Literal["asc", "desc"]) -> list[Any]:
        return [rollout.input for rollout in await store.query_rollouts(sort_by="end_time", sort_order=order)]

    assert (await inputs("asc"), await inputs("desc")) == ([2, 0, 1], [0, 1, 2])


async def test_pages_are_sorted_and_counted_and_those_of_one_batch_have_no_ties(store: LightningStore) -> None:
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])

    page = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=2, offset=1)

    assert [r.input for r in page] == [1, 0]
    assert (page.limit, page.offset, page.total) == (2, 1, 3)
    assert rollouts[2].start_time - rollouts[0].start_time < 0.001


async def test_wait_returns_finished_rollouts_and_ignores_unknown_ids(store: LightningStore) -> None:
    done, running = await store.start_rollout("a"), await store.start_rollout("b")
    await finish(store, done)

    finished = await store.wait_for_rollouts(rollout_ids=[done.rollout_id, running.rollout_id, "nope"], timeout=0)

    assert [r.rollout_id for r in finished] == [done.rollout_id]
    assert await store.wait_for_rollouts(["nope"], None) == []


def _has_waiters(store: LightningStore) -> bool:
    inner: Any = getattr(store, "store", store)
    return bool(inner._board.has_waiters)


async def test_waiters_wake_when_the_rollout_finishes(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    waiters = [asyncio.create_task(store.wait_for_rollouts([rollout.rollout_id])) for _ in range(3)]
    while not _has_waiters(store):
        await asyncio.sleep(0)

    await finish(store, rollout, "failed")
    answers = await asyncio.wait_for(asyncio.gather(*waiters), 10)

    assert [[r.status for r in answer] for answer in answers] == [["failed"]] * 3


async def test_each_rollout_goes_to_one_of_many_waiters(store: LightningStore) -> None:
    waiting = [asyncio.create_task(store.dequeue_rollout(wait=30)) for _ in range(20)]
    queued = [await store.enqueue_rollout(n) for n in range(20)]
    claimed = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert sorted(c.rollout_id for c in claimed if c) == sorted(r.rollout_id for r in queued)


async def test_cancelled_waiter_leaves_the_work_to_others(store: LightningStore) -> None:
    gone = asyncio.create_task(store.dequeue_rollout(wait=30))
    stays = asyncio.create_task(store.dequeue_rollout("w", wait=30))
    while not _has_waiters(store):
        await asyncio.sleep(0)

    gone.cancel()
    rollout = await store.enqueue_rollout("a")

    assert known(await asyncio.wait_for(stays, 10)).rollout_id == rollout.rollout_id


# ---------------------------------------------------------------------- inputs that are a `Task`

ROW = Task(rollout_id="row-7", input={"question": "why"}, mode="val", metadata={"level": 3})


async def made_of_row(store: LightningStore, **options: Any) -> list[Rollout]:
    """By every operation that makes rollouts."""
    requests = [EnqueueRolloutRequest(input=ROW, **options), EnqueueRolloutRequest(input="plain")]
    row, plain = await store.enqueue_many_rollouts(requests)
    assert (plain.input, plain.metadata, requests[0].input) == ("plain", {}, ROW)
    return [row, await store.start_rollout(ROW, **options), await store.enqueue_rollout(ROW, **options)]


async def test_the_input_of_a_task_is_stored_plainly_and_the_task_comes_back(store: LightningStore) -> None:
    for made in await made_of_row(store, metadata={"group": "g"}):
        rollout = known(await store.get_rollout_by_id(made.rollout_id))

        assert (type(rollout.input), rollout.input, rollout.mode) == (dict, {"question": "why"}, "val")
        assert (rollout.metadata or {})["group"] == "g"
        task = Task.of_rollout(rollout)
        assert (task.rollout_id, task.input, task.mode) == (made.rollout_id, {"question": "why"}, "val")
        assert task.metadata == {"level": 3}
        assert made.rollout_id != "row-7"


async def test_what_is_given_counts_before_what_the_task_says(store: LightningStore) -> None:
    resources = await store.add_resources({})
    for made in await made_of_row(store, mode="train", resources_id=resources.resources_id):
        task = Task.of_rollout(made)
        assert (made.mode, task.mode, task.resources_id) == ("train", "train", resources.resources_id)
