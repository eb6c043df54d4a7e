"""The memory store's own ways: eviction, threads, pickling."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agentlightning.errors import ConfigurationError, InvalidValue, RequestConflict, SpansEvicted, StoreUnavailable
from agentlightning.store import memory
from agentlightning.store.memory import InMemoryLightningStore, estimate_model_size
from agentlightning.store.notices import NoticeBoard
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig, Span, TraceStatus
from agentlightning.utils.metrics import PrometheusMetricsBackend


def test_size_of_a_model_is_its_object_and_its_values() -> None:
    status = TraceStatus(status_code="OK", description="fine")

    expected = sys.getsizeof(status) + sys.getsizeof("OK") + sys.getsizeof("fine")
    assert estimate_model_size(status) == expected
    inner = sum(map(sys.getsizeof, ("k", [1, 2], 1, "a")))
    assert estimate_model_size({"k": [1, "a"]}) == sys.getsizeof({"k": 1}) + inner


def test_thresholds_are_shares_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_detect_total_memory_bytes", lambda: 10_000)
    given: list[tuple[Any, Any]] = [(None, None), (0.5, None), (0.5, 0.1), (100, 50), (1, 0), (1.0, None)]

    stores = [InMemoryLightningStore(eviction_memory_threshold=one, safe_memory_threshold=two) for one, two in given]

    found = [(store._eviction_threshold_bytes, store._safe_threshold_bytes) for store in stores]
    assert found == [(7000, 5600), (5000, 4000), (5000, 1000), (100, 50), (1, 0), (10000, 8000)]


def test_senseless_thresholds_are_refused() -> None:
    alone: list[Any] = [0, 0.0, 1.5, -5, True]
    for eviction, safe in (*((each, None) for each in alone), (100, 100), (100, 200), (100, -1), (100, 1.5)):
        with pytest.raises(ConfigurationError, match="memory_threshold"):
            InMemoryLightningStore(eviction_memory_threshold=eviction, safe_memory_threshold=safe)


def estimate(span: Span) -> int:
    return -10 if span.name == "odd" else 10


async def test_oldest_spans_are_dropped_until_the_safe_threshold_holds(clock: Any, make_span: Any) -> None:
    store = InMemoryLightningStore(
        eviction_memory_threshold=50, safe_memory_threshold=20, span_size_estimator=estimate, clock=clock
    )
    rollouts = []
    for n in range(3):
        clock.advance(1)
        rollouts.append(await store.start_rollout(n))
        await store.add_many_spans([make_span(rollouts[n]), make_span(rollouts[n], name="odd"), make_span(rollouts[n])])

    for rollout in rollouts[:2]:
        with pytest.raises(SpansEvicted, match=rollout.rollout_id):
            await store.query_spans(rollout.rollout_id)
    assert issubclass(SpansEvicted, RuntimeError)  # which the earlier release raised
    assert len(await store.query_spans(rollouts[2].rollout_id)) == 3
    assert (await store.statistics())["total_span_bytes"] == 20  # a size below zero counts as none
    assert len(await store.query_rollouts()) == 3


GROWTH_SCRIPT = Path(__file__).parent / "memory_growth.py"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the memory of a process as Linux tells it")
def test_the_estimate_is_within_a_fifth_of_what_the_process_grows_by() -> None:
    done = subprocess.run([sys.executable, str(GROWTH_SCRIPT)], capture_output=True, text=True, check=True)

    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ratios = {shape: estimate / growth for shape, growth, estimate in rows}
    assert len(ratios) == 6
    assert {shape: ratio for shape, ratio in ratios.items() if not 0.8 < ratio < 1.2} == {}


async def test_inputs_and_metadata_of_rollouts_are_counted() -> None:
    store = InMemoryLightningStore()

    first = await store.enqueue_rollout("x" * 100_000)
    await store.enqueue_rollout("small", metadata={"large": "y" * 50_000})
    both = (await store.statistics())["total_rollout_bytes"]
    await store.update_rollout(first.rollout_id, input="small")
    one = (await store.statistics())["total_rollout_bytes"]

    assert 150_000 < both < 160_000
    assert 50_000 < one < 60_000


async def test_an_operation_that_fails_leaves_the_counted_bytes_as_they_were(make_span: Any) -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("a")
    before = await store.statistics()

    with pytest.raises(RequestConflict):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input="x" * 1000, rollout_id=name) for name in ("new", rollout.rollout_id)]
        )
    with pytest.raises(InvalidValue):
        await store.add_many_spans([make_span(rollout), make_span(rollout, attributes={"a": float("nan")})])

    after = await store.statistics()
    names = ("total_rollouts", "total_spans", "total_rollout_bytes", "total_span_bytes")
    assert [after[name] for name in names] == [before[name] for name in names]


async def test_rollouts_above_the_threshold_are_warned_about_once_and_drop_nothing(
    make_span: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = InMemoryLightningStore(eviction_memory_threshold=50_000)
    rollout = await store.start_rollout("a")
    await store.add_span(make_span(rollout))

    for _ in range(3):
        await store.enqueue_rollout("x" * 30_000)

    assert [record.getMessage()[:50] for record in caplog.records] == [
        "The inputs and metadata of 3 rollouts take about 6"
    ]
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_a_task_that_contains_itself_is_kept() -> None:
    class Knot(BaseModel):
        inner: Any = None

    knot = Knot()
    knot.inner = knot
    store = InMemoryLightningStore()

    rollout = await store.enqueue_rollout(knot)

    assert rollout.input is knot


# ---------------------------------------------------------------------- how much memory there is


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": "1000000"}, 1_000_000),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "2000000"}, 2_000_000),
        ("0::/of/the/host", {"memory.max": "3000000"}, 3_000_000),
        ("5:cpu:/x\n4:memory,other:/docker/1", {"memory/memory.limit_in_bytes": "4000000"}, 4_000_000),
        ("4:memory:/d", {"memory/d/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
    ids=["v2", "v2 without limit", "v2 of a group above", "v2 in a container", "v1", "v1 without limit", "no groups"],
)
def test_the_limit_of_a_container_is_the_memory_there_is(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(f"{text}\n")

    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory._detect_total_memory_bytes(tmp_path) == (limit or machine)


# ---------------------------------------------------------------------- closing


async def test_a_closed_store_refuses_work() -> None:
    store = InMemoryLightningStore()
    await store.close()
    await store.close()

    with pytest.raises(StoreUnavailable, match="is closed"):
        await store.enqueue_rollout("b")
    with pytest.raises(StoreUnavailable, match="is closed"):
        await store.query_rollouts()


async def test_pickled_store_keeps_its_content_without_its_tracker_and_works(make_span: Any) -> None:
    store = InMemoryLightningStore(tracker=PrometheusMetricsBackend(), span_size_estimator=estimate_model_size)
    await store.enqueue_rollout({"n": 1})
    claimed = await store.dequeue_rollout()
    await store.add_span(make_span(claimed))

    copy: InMemoryLightningStore = pickle.loads(pickle.dumps(store))

    assert await copy.query_rollouts() == await store.query_rollouts()
    await copy.add_span(make_span(claimed))
    await copy.enqueue_rollout("more")
    assert (await store.statistics())["total_rollouts"] == 1
    assert (await copy.statistics())["total_rollouts"] == 2


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
    store._board = NoticeBoard(capacity=3)
    notices = store.subscribe()
    for n in range(5):
        await store.enqueue_rollout(n, rollout_id=f"r-{n}")

    gap = await anext(notices)
    await store.enqueue_rollout(9, rollout_id="r-9")
    after = await anext(notices)
    await notices.aclose()  # type: ignore[attr-defined]

    assert (gap.kind, after.rollout_id) == ("gap", "r-9")


async def test_spans_of_finished_rollouts_are_dropped_before_those_of_running_ones(clock: Any, make_span: Any) -> None:
    store = InMemoryLightningStore(
        eviction_memory_threshold=45, safe_memory_threshold=40, span_size_estimator=estimate, clock=clock
    )
    rollouts = []
    for n in range(4):
        clock.advance(1)
        rollouts.append(await store.start_rollout(n))
        await store.add_span(make_span(rollouts[n]))
    await store.update_attempt(rollouts[2].rollout_id, "latest", status="succeeded")
    await store.update_attempt(rollouts[3].rollout_id, "latest", status="failed")

    async def is_dropped(n: int) -> bool:
        try:
            return not await store.query_spans(rollouts[n].rollout_id)
        except SpansEvicted:
            return True

    dropped = []
    for _ in range(3):  # each is one too many
        await store.add_span(make_span(rollouts[1]))
        dropped.append([n for n in range(4) if await is_dropped(n)])
    assert dropped == [[2], [2, 3], [0, 2, 3]]


async def test_worker_that_goes_on_to_its_next_rollout_is_never_idle() -> None:
    store = InMemoryLightningStore()
    for task in "ab":
        await store.enqueue_rollout(task)
    (held,) = await store.claim_rollouts(worker_id="w")

    claim = await store.finish_and_claim(
        held.rollout.rollout_id, held.rollout.attempt.attempt_id, "succeeded", worker_id="w"
    )

    worker = await store.get_worker_by_id("w")
    assert claim is not None
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("busy", claim.rollout.attempt.attempt_id)
    assert worker.last_idle_time is None
