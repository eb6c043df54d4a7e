"""The output of a rollout, over every back end: written with the status, seen by every question."""

import pytest

from agentlightning.errors import InvalidQuery
from agentlightning.store import LightningStore
from agentlightning.types import Rollout, RolloutConfig

OUTPUT = {"answer": "größer", "steps": [1, 2.5, None, True]}


async def stored(store: LightningStore, rollout_id: str) -> Rollout:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout


async def test_an_output_is_written_with_the_status_and_seen_by_every_question(store: LightningStore) -> None:
    started = await store.start_rollout("a")

    await store.finish_attempt(started.rollout_id, started.attempt.attempt_id, "succeeded", output=OUTPUT)

    (waited,) = await store.wait_for_rollouts([started.rollout_id], timeout=0)
    (queried,) = await store.query_rollouts()
    for rollout in (await stored(store, started.rollout_id), waited, queried):
        assert (rollout.status, rollout.output, rollout.input) == ("succeeded", OUTPUT, "a")


async def test_an_output_is_written_where_the_next_rollout_is_claimed(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    await store.enqueue_rollout("b")
    (first,) = await store.dequeue_many_rollouts()

    claim = await store.finish_and_claim(first.rollout_id, first.attempt.attempt_id, "succeeded", output="text")

    assert claim is not None
    assert (claim.rollout.input, claim.rollout.output) == ("b", None)
    assert (await stored(store, first.rollout_id)).output == "text"


async def test_an_attempt_that_gives_no_output_leaves_the_one_there_is(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=3, retry_condition=["failed"])
    started = await store.start_rollout("a", config=config)
    await store.finish_attempt(started.rollout_id, started.attempt.attempt_id, "succeeded", output="first")

    again = await store.start_attempt(started.rollout_id)
    await store.finish_attempt(again.rollout_id, again.attempt.attempt_id, "failed")

    assert (again.output, (await stored(store, again.rollout_id)).output) == ("first", "first")


async def test_a_later_attempt_replaces_the_output(store: LightningStore) -> None:
    started = await store.start_rollout("a")
    await store.finish_attempt(started.rollout_id, started.attempt.attempt_id, "succeeded", output="first")
    again = await store.start_attempt(started.rollout_id)

    await store.finish_attempt(again.rollout_id, again.attempt.attempt_id, "succeeded", output=None)

    assert (await stored(store, again.rollout_id)).output is None


async def test_the_output_of_an_attempt_that_was_given_up_is_not_the_rollout_s(store: LightningStore) -> None:
    started = await store.start_rollout("a")
    again = await store.start_attempt(started.rollout_id)
    await store.finish_attempt(again.rollout_id, again.attempt.attempt_id, "succeeded", output="newest")

    await store.finish_attempt(started.rollout_id, started.attempt.attempt_id, "succeeded", output="late")

    assert (await stored(store, started.rollout_id)).output == "newest"


async def test_an_output_can_be_set_and_taken_away_by_an_update(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("a")

    written = await store.update_rollout(rollout.rollout_id, output=OUTPUT)
    renamed = await store.update_rollout(rollout.rollout_id, metadata={"k": 1})
    emptied = await store.update_rollout(rollout.rollout_id, output=None)

    assert [r.output for r in (rollout, written, renamed, emptied)] == [None, OUTPUT, OUTPUT, None]
    assert emptied.metadata == {"k": 1}


async def test_rollouts_are_not_sorted_by_their_outputs(store: LightningStore) -> None:
    with pytest.raises(InvalidQuery, match="output"):
        await store.query_rollouts(sort_by="output")


async def test_an_output_that_was_handed_out_is_the_caller_s_own(store: LightningStore) -> None:
    given = {"list": [1]}
    rollout = await store.enqueue_rollout("a")
    await store.update_rollout(rollout.rollout_id, output=given)

    given["list"].append(2)
    (await stored(store, rollout.rollout_id)).output["list"].append(3)

    assert (await stored(store, rollout.rollout_id)).output == {"list": [1]}
