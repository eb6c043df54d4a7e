"""The memory store's own ways: eviction, threads, pickling."""

import asyncio
import pickle
import sys
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError, SpansEvicted
from agentlightning.store import memory
from agentlightning.store.memory import InMemoryLightningStore, estimate_model_size
from agentlightning.types import RolloutConfig, TraceStatus

GIB = 1024**3


def test_size_of_a_model_is_its_object_and_its_values() -> None:
    status = TraceStatus(status_code="OK", description="fine")

    expected = sys.getsizeof(status) + sys.getsizeof("OK") + sys.getsizeof("fine")
    assert estimate_model_size(status) == expected
    assert estimate_model_size({"k": [1, "a"]}) == sys.getsizeof({"k": 1}) + sum(map(sys.getsizeof, ([1, 2], 1, "a")))


@pytest.mark.parametrize(
    ("eviction", "safe", "expected"),
    [
        (None, None, (7000, 5600)),
        (0.5, None, (5000, 4000)),
        (0.5, 0.1, (5000, 1000)),
        (100, 50, (100, 50)),
        (1, 0, (1, 0)),
        (1.0, None, (10000, 8000)),
    ],
)
def test_thresholds_are_shares_or_bytes(
    monkeypatch: pytest.MonkeyPatch, eviction: Any, safe: Any, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(memory, "_detect_total_memory_bytes", lambda: 10_000)

    store = InMemoryLightningStore(eviction_memory_threshold=eviction, safe_memory_threshold=safe)

    assert (store._eviction_threshold_bytes, store._safe_threshold_bytes) == expected


@pytest.mark.parametrize(
    ("eviction", "safe"),
    [(0, None), (0.0, None), (1.5, None), (-5, None), (100, 100), (100, 200), (100, -1), (100, 1.5), (True, None)],
)
def test_senseless_thresholds_are_refused(eviction: Any, safe: Any) -> None:
    with pytest.raises(ConfigurationError, match="memory_threshold"):
        InMemoryLightningStore(eviction_memory_threshold=eviction, safe_memory_threshold=safe)


async def test_oldest_spans_are_dropped_until_the_safe_threshold_holds(clock: Any, make_span: Any) -> None:
    store = InMemoryLightningStore(
        eviction_memory_threshold=50, safe_memory_threshold=20, span_size_estimator=lambda span: 10, clock=clock
    )
    rollouts = []
    for n in range(3):
        clock.advance(1)
        rollouts.append(await store.start_rollout(n))
        await store.add_many_spans([make_span(rollouts[n]), make_span(rollouts[n])])

    for rollout in rollouts[:2]:
        with pytest.raises(SpansEvicted, match=rollout.rollout_id):
            await store.query_spans(rollout.rollout_id)
    assert len(await store.query_spans(rollouts[2].rollout_id)) == 2
    assert (await store.statistics())["total_span_bytes"] == 20
    assert len(await store.query_rollouts()) == 3


async def test_evicted_spans_raise_what_the_earlier_release_raised(make_span: Any) -> None:
    store = InMemoryLightningStore(eviction_memory_threshold=1)
    rollout = await store.start_rollout("a")
    await store.add_span(make_span(rollout))

    with pytest.raises(RuntimeError):
        await store.query_spans(rollout.rollout_id)


async def test_sizes_are_exact_from_half_of_the_threshold(make_span: Any) -> None:
    probe = InMemoryLightningStore()
    rollout = await probe.start_rollout("a")
    exact = estimate_model_size(make_span(rollout))

    store = InMemoryLightningStore(eviction_memory_threshold=exact * 12 + 50)
    rollout = await store.start_rollout("a")
    for n in range(10):
        await store.add_span(make_span(rollout, sequence_id=n))

    total = (await store.statistics())["total_span_bytes"]
    assert total == sum(estimate_model_size(span) for span in await store.query_spans(rollout.rollout_id))


async def test_negative_estimates_count_as_nothing(make_span: Any) -> None:
    store = InMemoryLightningStore(span_size_estimator=lambda span: -5)
    rollout = await store.start_rollout("a")
    await store.add_span(make_span(rollout))

    assert (await store.statistics())["total_span_bytes"] == 0


async def test_any_object_may_be_a_task() -> None:
    store = InMemoryLightningStore()
    task = object()

    rollout = await store.enqueue_rollout(task)

    assert rollout.input is task


async def test_pickled_store_keeps_its_content_and_works(make_span: Any) -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout({"n": 1})
    claimed = await store.dequeue_rollout()
    await store.add_span(make_span(claimed))

    copy: InMemoryLightningStore = pickle.loads(pickle.dumps(store))

    assert await copy.query_rollouts() == await store.query_rollouts()
    await copy.enqueue_rollout("more")
    assert (await store.statistics())["total_rollouts"] == 1
    assert (await copy.statistics())["total_rollouts"] == 2


def test_one_store_serves_one_loop_after_another() -> None:
    store = InMemoryLightningStore()

    rollout = asyncio.run(store.enqueue_rollout("a"))
    claimed = asyncio.run(store.dequeue_rollout())

    assert claimed is not None
    assert claimed.rollout_id == rollout.rollout_id


async def test_watchdog_is_debounced_on_demand(clock: Any) -> None:
    store = InMemoryLightningStore(scan_debounce_seconds=100, clock=clock)
    first = await store.start_rollout("a", config=RolloutConfig(timeout_seconds=1))
    clock.advance(2)
    assert (await store.query_rollouts())[0].status == "failed"
    second = await store.start_rollout("b", config=RolloutConfig(timeout_seconds=1))

    clock.advance(50)
    assert [r.status for r in await store.query_rollouts()] == ["failed", "preparing"]
    clock.advance(60)
    assert [r.status for r in await store.query_rollouts()] == ["failed", "failed"]
    assert first.rollout_id != second.rollout_id


async def test_slow_subscriber_is_told_of_the_gap() -> None:
    store = InMemoryLightningStore()
    store._board = memory.NoticeBoard(capacity=3)
    notices = store.subscribe()
    for n in range(5):
        await store.enqueue_rollout(n, rollout_id=f"r-{n}")

    gap = await anext(notices)
    await store.enqueue_rollout(9, rollout_id="r-9")
    after = await anext(notices)
    await notices.aclose()  # type: ignore[attr-defined]

    assert (gap.kind, after.rollout_id) == ("gap", "r-9")
