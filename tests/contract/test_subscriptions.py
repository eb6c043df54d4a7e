"""Subscriptions, over every back end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from agentlightning.errors import InvalidQuery, InvalidValue, StoreUnavailable
from agentlightning.store import LightningStore
from agentlightning.types import Notice


async def take(notices: AsyncIterator[Notice], count: int) -> list[Notice]:
    """The next notices, which must come soon."""
    return [await asyncio.wait_for(anext(notices), 10) for _ in range(count)]


async def test_subscriber_is_told_of_everything_in_order(store: LightningStore, make_span: Any) -> None:
    await store.enqueue_rollout("before", rollout_id="before")
    await store.update_rollout("before", status="cancelled")
    notices = store.subscribe()

    await store.enqueue_rollout("a", rollout_id="r")
    claimed = await store.dequeue_rollout("w")
    await store.add_span(make_span(claimed, sequence_id=4, name="llm"))
    update = await store.add_resources({})
    run = await store.start_run()
    await store.add_metrics(run.run_id, 3, {"x": 1.0})
    told = await take(notices, 8)
    await notices.aclose()  # type: ignore[attr-defined]

    assert claimed is not None
    assert [(n.kind, n.rollout_id, n.status, n.name, n.number) for n in told] == [
        ("rollout", "r", "queuing", None, None),
        ("rollout", "r", "preparing", None, None),
        ("worker", None, "busy", "w", None),
        ("span", "r", None, "llm", 4),
        ("rollout", "r", "running", None, None),
        ("resources", None, None, update.resources_id, 1),
        ("run", None, "running", run.run_id, None),
        ("metrics", None, None, run.run_id, 3),
    ]
    assert [n.cursor for n in told] == list(range(told[0].cursor, told[0].cursor + 8))


async def test_nobody_is_told_what_a_refused_call_had_begun(store: LightningStore, make_span: Any) -> None:
    rollout = await store.start_rollout("a")
    notices, key = store.subscribe(["span"]), (rollout.rollout_id, rollout.attempt.attempt_id)

    with pytest.raises(InvalidQuery, match="no notices of kind"):
        store.subscribe(["weather"])  # type: ignore[list-item]
    with suppress(InvalidValue):  # a store in memory takes any output
        await store.finish_attempt(*key, "succeeded", spans=[make_span(rollout, name="last")], output=object())
    stored = [span.name for span in await store.query_spans(rollout.rollout_id)]
    await store.add_span(make_span(rollout, name="later"))

    told = await take(notices, len(stored) + 1)
    await notices.aclose()  # type: ignore[attr-defined]
    assert [notice.name for notice in told] == [*stored, "later"]


async def test_sleeping_subscriber_is_woken(store: LightningStore) -> None:
    notices = store.subscribe(["rollout"])
    waiting = asyncio.create_task(take(notices, 1))
    inner: Any = getattr(store, "store", store)
    while not inner._board.has_waiters:
        await asyncio.sleep(0)

    await store.enqueue_rollout("a", rollout_id="r")

    assert [n.rollout_id for n in await waiting] == ["r"]
    await notices.aclose()  # type: ignore[attr-defined]
    while inner._board.has_waiters:  # over a network the end arrives a little later
        await asyncio.sleep(0)


async def test_subscriber_resumes_behind_its_cursor(store: LightningStore) -> None:
    notices = store.subscribe()
    for n in range(4):
        await store.enqueue_rollout(n, rollout_id=f"r-{n}")
    first = await take(notices, 2)
    await notices.aclose()  # type: ignore[attr-defined]

    resumed = store.subscribe(after=first[-1].cursor)
    told = await take(resumed, 2)
    await resumed.aclose()  # type: ignore[attr-defined]

    assert [n.rollout_id for n in told] == ["r-2", "r-3"]


async def test_whoever_waits_is_told_that_the_store_was_closed(store: LightningStore) -> None:
    rollout = await store.start_rollout("a")
    waiting = asyncio.gather(
        store.wait_for_rollouts([rollout.rollout_id], timeout=3600),
        store.dequeue_rollout(wait=3600),
        anext(store.subscribe()),
        return_exceptions=True,
    )
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.1)

    await store.close()

    waited, claimed, followed = await asyncio.wait_for(waiting, 10)
    assert [(type(error), "closed" in str(error)) for error in (waited, followed)] == [(StoreUnavailable, True)] * 2
    assert claimed is None or isinstance(claimed, StoreUnavailable)  # a runner's client finds no work
