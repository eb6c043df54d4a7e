"""Finishing an attempt with its last spans and its output, over every back end."""

from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, RolloutConfig, Span
from tests.contract.conftest import known

OUTPUT = {"answer": "größer", "steps": [1, 2.5, None, True]}


def last_span(rollout: AttemptedRollout, name: str, number: int = 0) -> Span:
    ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return Span.from_attributes(attributes={"reward": 1.0}, sequence_id=number, name=name, **ids)


async def stored(store: LightningStore, rollout_id: str) -> Rollout:
    return known(await store.get_rollout_by_id(rollout_id))


async def test_last_spans_are_numbered_in_their_order_and_the_status_is_written(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    assert await store.get_next_span_sequence_id(*ids) == 1
    await store.add_many_spans([span := last_span(rollout, "known", 1)])

    spans = [last_span(rollout, "b", 70), span, last_span(rollout, "a")]
    attempt = await store.finish_attempt(*ids, "succeeded", spans=spans, metadata={"note": 1})

    assert (attempt.status, attempt.metadata) == ("succeeded", {"note": 1})
    found = [(span.name, span.sequence_id) for span in await store.query_spans(rollout.rollout_id)]
    assert found == [("known", 1), ("b", 2), ("a", 3)]
    assert await store.get_next_span_sequence_id(*ids) == 4
    assert (await stored(store, rollout.rollout_id)).status == "succeeded"


async def test_foreign_span_or_status_is_refused_and_nothing_is_written(store: LightningStore) -> None:
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)

    with pytest.raises(InvalidValue, match="its own spans only"):
        await store.finish_attempt(*ids, "succeeded", spans=[last_span(rollout, "mine"), last_span(other, "theirs")])
    with pytest.raises(InvalidValue):
        await store.finish_attempt(*ids, "nonsense", spans=[last_span(rollout, "mine")])  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await store.finish_attempt(rollout.rollout_id, "at-none", "succeeded")

    assert len(await store.query_spans(rollout.rollout_id)) == 0
    assert known(await store.get_latest_attempt(rollout.rollout_id)).status == "preparing"


# ---------------------------------------------------------------------- outputs


async def test_an_output_is_written_with_the_status_and_seen_by_every_question(store: LightningStore) -> None:
    started = await store.start_rollout("a")

    await store.finish_attempt(started.rollout_id, started.attempt.attempt_id, "succeeded", output=OUTPUT)

    (waited,) = await store.wait_for_rollouts([started.rollout_id], timeout=0)
    (queried,) = await store.query_rollouts()
    for rollout in (await stored(store, started.rollout_id), waited, queried):
        assert (rollout.status, rollout.output, rollout.input) == ("succeeded", OUTPUT, "a")
    with pytest.raises(InvalidQuery, match="output"):
        await store.query_rollouts(sort_by="output")


async def test_the_output_is_that_of_the_latest_attempt_that_gives_one(store: LightningStore) -> None:
    started = await store.start_rollout("a", config=RolloutConfig(max_attempts=3, retry_condition=["failed"]))
    await store.finish_attempt(started.rollout_id, started.attempt.attempt_id, "succeeded", output="first")

    second = await store.start_attempt(started.rollout_id)
    requeued = await store.finish_attempt(second.rollout_id, second.attempt.attempt_id, "failed")
    without = await stored(store, started.rollout_id)
    third = await store.start_attempt(started.rollout_id)
    await store.finish_attempt(third.rollout_id, third.attempt.attempt_id, "succeeded", output="newest")
    await store.finish_attempt(started.rollout_id, started.attempt.attempt_id, "succeeded", output="late")

    assert (second.output, requeued.status, without.status, without.output) == ("first", "failed", "requeuing", "first")
    assert (await stored(store, started.rollout_id)).output == "newest"
    await store.finish_attempt(third.rollout_id, third.attempt.attempt_id, "succeeded", output=None)
    assert (await stored(store, started.rollout_id)).output is None


async def test_an_output_can_be_set_and_taken_away_by_an_update(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("a")

    written = await store.update_rollout(rollout.rollout_id, output=OUTPUT)
    renamed = await store.update_rollout(rollout.rollout_id, metadata={"k": 1})
    emptied = await store.update_rollout(rollout.rollout_id, output=None)

    assert [r.output for r in (rollout, written, renamed, emptied)] == [None, OUTPUT, OUTPUT, None]
    assert emptied.metadata == {"k": 1}
