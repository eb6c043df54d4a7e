"""Finishing an attempt with its last spans, over every back end."""

import pytest

from agentlightning.errors import InvalidValue, NotFound
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, RolloutConfig, Span


def last_span(rollout: AttemptedRollout, name: str, number: int = 0) -> Span:
    return Span.from_attributes(
        attributes={"reward": 1.0},
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=number,
        name=name,
    )


async def test_last_spans_are_numbered_in_their_order_and_the_status_is_written(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    assert await store.get_next_span_sequence_id(*ids) == 1

    attempt = await store.finish_attempt(
        *ids, "succeeded", spans=[last_span(rollout, "b", 70), last_span(rollout, "a")], metadata={"note": 1}
    )

    assert (attempt.status, attempt.metadata) == ("succeeded", {"note": 1})
    spans = await store.query_spans(rollout.rollout_id)
    assert [(span.name, span.sequence_id) for span in spans] == [("b", 2), ("a", 3)]
    assert await store.get_next_span_sequence_id(*ids) == 4
    finished = await store.get_rollout_by_id(rollout.rollout_id)
    assert finished is not None
    assert finished.status == "succeeded"


async def test_without_spans_only_the_status_is_written(store: LightningStore) -> None:
    rollout = await store.start_rollout("a", config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))

    attempt = await store.finish_attempt(rollout.rollout_id, rollout.attempt.attempt_id, "failed")

    assert attempt.status == "failed"
    requeued = await store.get_rollout_by_id(rollout.rollout_id)
    assert requeued is not None
    assert requeued.status == "requeuing"


async def test_span_that_is_known_already_is_left_out(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    known, new = last_span(rollout, "known", 1), last_span(rollout, "new")
    await store.add_many_spans([known])

    await store.finish_attempt(rollout.rollout_id, rollout.attempt.attempt_id, "succeeded", spans=[known, new])

    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["known", "new"]


async def test_foreign_span_or_status_is_refused_and_nothing_is_written(store: LightningStore) -> None:
    rollout, other = await store.start_rollout("a"), await store.start_rollout("b")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)

    with pytest.raises(InvalidValue, match="its own spans only"):
        await store.finish_attempt(*ids, "succeeded", spans=[last_span(rollout, "mine"), last_span(other, "theirs")])
    with pytest.raises(InvalidValue):
        await store.finish_attempt(*ids, "nonsense", spans=[last_span(rollout, "mine")])  # type: ignore[arg-type]

    assert len(await store.query_spans(rollout.rollout_id)) == 0
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.status == "preparing"


async def test_unknown_attempt_is_not_found(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")

    with pytest.raises(NotFound):
        await store.finish_attempt(rollout.rollout_id, "at-none", "succeeded")
