"""Spans that have begun and not ended, over every back end: seen apart from all others, and never for ever."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from agentlightning.errors import InvalidValue
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, RolloutConfig, Span
from tests.contract.conftest import known

PATIENCE_SECONDS = 60.0


def begun(rollout: AttemptedRollout, span_id: str = "s1", **attributes: Any) -> Span:
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        span_id=span_id,
        name=f"step {span_id}",
        start_time=1.0,
    )


async def open_ids(store: LightningStore, rollout: AttemptedRollout) -> list[str]:
    return [span.span_id for span in await store.query_open_spans(rollout.rollout_id)]


async def test_a_span_is_open_until_it_ends(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    await store.add_open_spans([begun(rollout), begun(rollout, "s2")])
    assert await open_ids(store, rollout) == ["s1", "s2"]
    assert (list(await store.query_spans(rollout.rollout_id)), (await store.statistics())["total_spans"]) == ([], 0)
    assert known(await store.get_latest_attempt(rollout.rollout_id)).status == "preparing"

    ended = begun(rollout).model_copy(update={"end_time": 2.0, "sequence_id": 1})
    await store.add_many_spans([ended])

    assert await open_ids(store, rollout) == ["s2"]


async def test_an_open_span_tells_who_works_in_outline(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")

    await store.add_open_spans([begun(rollout, agent="critic", text="x" * 5000, ids=[1, 2])])

    (span,) = await store.query_open_spans(rollout.rollout_id)
    assert (span.name, span.start_time, span.end_time) == ("step s1", 1.0, None)
    assert span.attributes == {"agent": "critic", "text": "x" * 1000}


async def test_an_attempt_that_is_over_or_unknown_has_no_open_spans(store: LightningStore) -> None:
    rollout = await store.start_rollout("a", config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    await store.add_open_spans([begun(rollout)])

    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
    assert await open_ids(store, rollout) == []
    await store.add_open_spans([begun(rollout, "late")])
    await store.add_open_spans([begun(rollout).model_copy(update={"rollout_id": "ro-none"})])

    assert await open_ids(store, known(await store.dequeue_rollout())) == []
    assert list(await store.query_open_spans("ro-none")) == []


async def test_subscribers_are_told_that_a_span_has_begun_once(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    changes: Any = store.subscribe(["span"])

    for _ in range(2):
        await store.add_open_spans([begun(rollout)])
    await store.add_many_spans([begun(rollout).model_copy(update={"sequence_id": 7})])

    async with aclosing(changes):
        seen = [await asyncio.wait_for(changes.__anext__(), PATIENCE_SECONDS) for _ in range(2)]
    assert [(notice.name, notice.status, notice.number) for notice in seen] == [
        ("step s1", "open", None),
        ("step s1", None, 7),
    ]


async def test_of_very_many_open_spans_the_first_are_kept_and_odd_ids_refused(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")

    await store.add_open_spans([begun(rollout, f"s{number}") for number in range(300)])

    assert len(await open_ids(store, rollout)) == 200
    with pytest.raises(InvalidValue, match="1001 letters"):
        await store.add_open_spans([begun(rollout, "x" * 1001)])
