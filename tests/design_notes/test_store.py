"""The store as the notes describe it: one contract over memory, SQLite, HTTP and WebSocket."""

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import AgentLightningError
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, SqliteLightningStore
from agentlightning.types import LLM, AttemptedRollout, PromptTemplate, RolloutConfig
from agentlightning.utils.loop_thread import LoopThread
from tests.conftest import Clock, MakeSpan

LLM_1 = LLM(endpoint="http://localhost:1/v1", model="one")
LLM_2 = LLM(endpoint="http://localhost:1/v1", model="two")


async def _claimed(store: LightningStore) -> AttemptedRollout:
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    return claimed


# ------------------------------------------------------------------ the interface

_METHODS = {
    "start_rollout": ((83, 116), "input mode resources_id config metadata"),
    "enqueue_rollout": ((84, 117), "input mode resources_id config metadata"),
    "dequeue_rollout": ((118,), ""),
    "add_span": ((119, 410), "span"),
    "add_otel_span": ((120,), "rollout_id attempt_id readable_span sequence_id"),
    "query_rollouts": ((121,), "status rollout_ids"),
    "get_latest_attempt": ((122,), "rollout_id"),
    "get_latest_resources": ((123,), ""),
    "add_resources": ((124,), "resources"),
    "update_rollout": ((423,), "rollout_id input mode resources_id status config metadata"),
    "update_attempt": ((424,), "rollout_id attempt_id status worker_id last_heartbeat_time metadata"),
    "start_attempt": ((409,), "rollout_id"),
    "get_next_span_sequence_id": ((418,), "rollout_id attempt_id"),
    "wait_for_rollouts": ((419,), "rollout_ids timeout"),
}


@pytest.mark.parametrize(
    ("method", "names"),
    [pytest.param(name, names, marks=pytest.mark.claim(*numbers)) for name, (numbers, names) in _METHODS.items()],
)
@pytest.mark.claim(89, 90)
@pytest.mark.parametrize("kind", [LightningStore, InMemoryLightningStore, SqliteLightningStore, LightningStoreClient])
def test_a_store_has_the_methods_of_the_notes(kind: type[LightningStore], method: str, names: str) -> None:
    function = getattr(kind, method)

    assert set(names.split()) <= set(inspect.signature(function).parameters)
    assert inspect.iscoroutinefunction(function)


@pytest.mark.claim(61, 62, 63, 64, 65, 84, 85, 86, 87, 88, 89, 90, 112, 114, 141, 142, 150, 151, 272, 359, 407, 410)
async def test_a_rollout_goes_through_its_life_in_every_store(store: LightningStore, make_span: MakeSpan) -> None:
    queued = await store.enqueue_rollout("task", mode="train", metadata={"a": 1})
    claimed = await _claimed(store)
    span = await store.add_span(make_span(claimed))
    attempt = await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    rollout = await store.get_rollout_by_id(queued.rollout_id)

    assert queued.status == "queuing"
    assert claimed.rollout_id == queued.rollout_id
    assert span is not None
    assert attempt.status == "succeeded"
    assert rollout is not None
    assert (rollout.status, rollout.mode, rollout.metadata) == ("succeeded", "train", {"a": 1})
    assert [one.span_id for one in await store.query_spans(queued.rollout_id)] == [span.span_id]
    changed = await store.update_rollout(queued.rollout_id, metadata={"b": 2})
    assert changed.metadata == {"b": 2}


@pytest.mark.claim(83, 406)
async def test_a_rollout_that_is_started_has_its_first_attempt_at_once(store: LightningStore) -> None:
    started = await store.start_rollout("task", "val", None, RolloutConfig(timeout_seconds=3), {"a": 1})

    assert isinstance(started, AttemptedRollout)
    assert (started.status, started.mode, started.config.timeout_seconds) == ("preparing", "val", 3)
    assert started.attempt.sequence_id == 1
    assert await store.dequeue_rollout() is None


@pytest.mark.claim(125, 144, 145, 146, 147, 408)
async def test_the_oldest_rollout_is_claimed_first(store: LightningStore) -> None:
    queued = [await store.enqueue_rollout(number) for number in range(3)]

    claimed = [await _claimed(store) for _ in queued]

    assert [one.rollout_id for one in claimed] == [one.rollout_id for one in queued]
    assert {one.status for one in claimed} == {"preparing"}
    assert {one.attempt.sequence_id for one in claimed} == {1}
    assert await store.dequeue_rollout() is None


@pytest.mark.claim(148, 149)
async def test_the_first_span_makes_it_running_and_each_is_a_sign_of_life(
    store: LightningStore, clock: Clock, make_span: MakeSpan
) -> None:
    claimed = await store.start_rollout("task")
    times = []
    for number in (1, 2):
        clock.advance(5)
        await store.add_span(make_span(claimed, number))
        attempt = await store.get_latest_attempt(claimed.rollout_id)
        rollout = await store.get_rollout_by_id(claimed.rollout_id)
        assert attempt is not None
        assert rollout is not None
        assert (attempt.status, rollout.status) == ("running", "running")
        times.append(attempt.last_heartbeat_time)

    assert times == [clock.now - 5, clock.now]


@pytest.mark.claim(113, 325, 409, 413, 415, 420)
async def test_a_retry_by_hand_is_another_attempt(store: LightningStore, make_span: MakeSpan) -> None:
    first = await store.start_rollout("task")
    await store.add_span(make_span(first))
    await store.update_attempt(first.rollout_id, first.attempt.attempt_id, status="failed")

    second = await store.start_attempt(first.rollout_id)
    await store.add_span(make_span(second, 2))

    attempts = await store.query_attempts(first.rollout_id)
    latest = await store.get_latest_attempt(first.rollout_id)
    assert [one.sequence_id for one in attempts] == [1, 2]
    assert latest is not None
    assert latest.attempt_id == second.attempt.attempt_id
    assert len(await store.query_spans(first.rollout_id)) == 2
    assert len(await store.query_spans(first.rollout_id, second.attempt.attempt_id)) == 1


@pytest.mark.claim(127, 411, 418)
async def test_spans_of_opentelemetry_are_converted_and_numbered(store: LightningStore) -> None:
    claimed = await store.start_rollout("task")
    place = (claimed.rollout_id, claimed.attempt.attempt_id)
    tracer = TracerProvider().get_tracer("notes")
    numbers = []
    for name in ("one", "two"):
        span: Any = tracer.start_span(name, attributes={"a": 1})
        span.end()
        numbers.append(await store.get_next_span_sequence_id(*place))
        await store.add_otel_span(*place, span, numbers[-1])

    found = await store.query_spans(claimed.rollout_id)

    assert numbers == sorted(set(numbers))
    assert [(one.name, one.attributes["a"], one.sequence_id) for one in found] == [
        ("one", 1, numbers[0]),
        ("two", 1, numbers[1]),
    ]


@pytest.mark.claim(121, 126, 412, 414, 504)
async def test_rollouts_are_queried_by_status_and_id(store: LightningStore) -> None:
    queued = await store.enqueue_rollout("one")
    started = await store.start_rollout("two")

    found = await store.query_rollouts(["queuing"], [queued.rollout_id, started.rollout_id])
    again = await store.get_rollout_by_id(queued.rollout_id)

    assert [one.rollout_id for one in found] == [queued.rollout_id]
    assert (len(found), found[0], list(found)) == (1, again, [again])
    assert found == [again]
    assert found + [again] == [again, again] == [again] + found  # noqa: RUF005 # adding is what is tested


@pytest.mark.claim(25, 115, 128, 129, 162, 184, 416, 417, 421)
async def test_resources_have_versions_and_one_is_the_latest(store: LightningStore) -> None:
    assert await store.get_latest_resources() is None
    first = await store.add_resources({"main": LLM_1})
    second = await store.add_resources({"main": LLM_2})

    latest = await store.get_latest_resources()
    found = await store.get_resources_by_id(first.resources_id)

    assert first.resources_id != second.resources_id
    assert latest is not None
    assert found is not None
    assert (latest.resources_id, found.resources) == (second.resources_id, {"main": LLM_1})


@pytest.mark.claim(161, 422)
async def test_resources_are_replaced_or_extended(store: LightningStore) -> None:
    await store.update_resources("default", {"main": LLM_1})
    prompt = PromptTemplate(template="{q}", engine="f-string")

    extended = await store.update_resources("default", {"prompt": prompt}, merge=True)
    replaced = await store.update_resources("default", {"main": LLM_2})

    assert set(extended.resources) == {"main", "prompt"}
    assert replaced.resources == {"main": LLM_2}
    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources == {"main": LLM_2}


@pytest.mark.claim(41, 421, 506)
async def test_what_a_store_hands_out_is_a_copy(store: LightningStore) -> None:
    queued = await store.enqueue_rollout({"q": [1]})
    given: dict[str, Any] = {"main": LLM_1.model_copy()}
    update = await store.add_resources(given)
    given["main"].model = "changed"

    queued.input["q"].append(2)
    found = await store.get_rollout_by_id(queued.rollout_id)
    kept = await store.get_resources_by_id(update.resources_id)

    assert found is not None
    assert found.input == {"q": [1]}
    assert kept is not None
    assert kept.resources == {"main": LLM_1}


@pytest.mark.claim(423, 424)
async def test_updates_change_the_fields_of_the_notes(store: LightningStore) -> None:
    claimed = await store.start_rollout("task")
    rollout = await store.update_rollout(
        claimed.rollout_id,
        input="other",
        mode="test",
        resources_id="rs-1",
        config=RolloutConfig(max_attempts=2),
        metadata={"a": 1},
    )
    attempt = await store.update_attempt(
        claimed.rollout_id, "latest", worker_id="w-1", last_heartbeat_time=7.0, metadata={"b": 2}
    )
    ended = await store.update_rollout(claimed.rollout_id, status="cancelled")

    assert (rollout.input, rollout.mode, rollout.resources_id, rollout.metadata) == ("other", "test", "rs-1", {"a": 1})
    assert rollout.config.max_attempts == 2
    assert (attempt.worker_id, attempt.last_heartbeat_time, attempt.metadata) == ("w-1", 7.0, {"b": 2})
    assert ended.status == "cancelled"


# ------------------------------------------------------------------ waiting, queue, concurrency


@pytest.mark.claim(176, 419)
async def test_waiting_ends_with_its_timeout_or_with_the_rollouts(store: LightningStore) -> None:
    done, pending = await store.start_rollout("one"), await store.start_rollout("two")
    await store.update_attempt(done.rollout_id, "latest", status="succeeded")

    found = await store.wait_for_rollouts(rollout_ids=[done.rollout_id, pending.rollout_id], timeout=0.05)

    assert [one.rollout_id for one in found] == [done.rollout_id]


@pytest.mark.claim(66)
async def test_a_message_goes_to_one_worker_that_waits(store: LightningStore) -> None:
    waiting = [asyncio.create_task(store.claim_rollouts(worker_id=f"w-{n}", wait=60)) for n in range(2)]
    await asyncio.sleep(0)
    queued = [(await store.enqueue_rollout(n)).rollout_id for n in range(2)]

    claims = [claim for task in waiting for claim in await task]

    assert sorted(claim.rollout.rollout_id for claim in claims) == sorted(queued)


@pytest.mark.claim(24)
async def test_those_who_listen_hear_of_new_resources_without_asking(store: LightningStore) -> None:
    notices = store.subscribe(["resources"])
    update = await store.add_resources({"main": LLM_1})

    notice = await asyncio.wait_for(anext(notices), 60)

    assert (notice.kind, notice.name) == ("resources", update.resources_id)
    await notices.aclose()  # type: ignore[attr-defined] # a generator


@pytest.mark.claim(77, 78, 95, 131, 178, 261)
async def test_many_callers_at_once_claim_each_rollout_once(store: LightningStore) -> None:
    await asyncio.gather(*(store.enqueue_rollout(number) for number in range(40)))

    claimed = await asyncio.gather(*(store.dequeue_rollout() for _ in range(50)))

    ids = [one.rollout_id for one in claimed if one is not None]
    assert len(ids) == len(set(ids)) == 40


@pytest.mark.claim(130, 131, 165, 177)
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_store_is_used_and_awaited_from_several_event_loops(kind: str, tmp_path: Path) -> None:
    store = InMemoryLightningStore() if kind == "memory" else SqliteLightningStore(tmp_path / "s.db")
    here, there = LoopThread("here"), LoopThread("there")
    try:
        started = here.run(store.start_rollout("task"))
        waiting = there.start_soon(store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=60))
        here.run(store.update_attempt(started.rollout_id, "latest", status="succeeded"))

        assert [one.status for one in waiting.result(60)] == ["succeeded"]
    finally:
        here.run(store.close())
        here.stop()
        there.stop()


@pytest.mark.claim(131)
def test_threads_do_not_disturb_each_other() -> None:
    store = InMemoryLightningStore()

    def enqueue() -> None:
        for number in range(50):
            asyncio.run(store.enqueue_rollout(number))

    threads = [threading.Thread(target=enqueue) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(asyncio.run(store.query_rollouts())) == 200


@pytest.mark.claim(94)
async def test_rollouts_go_in_batches(store: LightningStore) -> None:
    from agentlightning.types import EnqueueRolloutRequest

    queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(3)])
    claimed = await store.dequeue_many_rollouts(limit=3)

    assert [one.rollout_id for one in claimed] == [one.rollout_id for one in queued]


@pytest.mark.claim(94)
async def test_one_update_carries_many_resources(store: LightningStore) -> None:
    many: dict[str, Any] = {f"prompt-{n}": PromptTemplate(template=f"{n}", engine="f-string") for n in range(20)}

    update = await store.add_resources(many)
    extended = await store.update_resources(update.resources_id, {"main": LLM_1, "other": LLM_2}, merge=True)

    assert update.resources == many
    assert extended.resources == {**many, "main": LLM_1, "other": LLM_2}


# ------------------------------------------------------------------ limits and faults


@pytest.mark.claim(174)
async def test_time_limits_are_applied_before_a_rollout_is_looked_at(store: LightningStore, clock: Clock) -> None:
    started = await store.start_rollout("task", config=RolloutConfig(timeout_seconds=10))
    clock.advance(11)

    found = await store.get_rollout_by_id(started.rollout_id)
    attempt = await store.get_latest_attempt(started.rollout_id)

    assert found is not None
    assert attempt is not None
    assert (found.status, attempt.status) == ("failed", "timeout")


@pytest.mark.claim(262)
async def test_a_worker_that_is_lost_does_not_cost_its_task(store: LightningStore) -> None:
    await store.enqueue_rollout("task")
    [claim] = await store.claim_rollouts(worker_id="w-1")

    await store.mark_worker_lost("w-1", "It was killed.")

    again = await store.dequeue_rollout()
    assert again is not None
    assert again.rollout_id == claim.rollout.rollout_id


@pytest.mark.claim(170, 171, 172, 173)
async def test_the_oldest_spans_are_dropped_until_it_is_safe(make_span: MakeSpan) -> None:
    store = InMemoryLightningStore(eviction_memory_threshold=40_000, safe_memory_threshold=20_000)
    rollouts = [await store.start_rollout(number) for number in range(8)]
    sizes = []
    for rollout in rollouts:
        await store.add_span(make_span(rollout, attributes={"text": "x" * 8_000}))
        sizes.append((await store.statistics())["total_span_bytes"])

    kept = []
    for rollout in rollouts:
        try:
            kept.append(bool(await store.query_spans(rollout.rollout_id)))
        except AgentLightningError:
            kept.append(False)

    assert store._eviction_threshold_bytes > store._safe_threshold_bytes
    assert 20_000 < max(sizes) <= 40_000
    assert kept == sorted(kept)
    assert not kept[0]
    assert kept[-1]


@pytest.mark.claim(80, 132)
async def test_another_store_finds_queue_and_rollouts_in_the_file(tmp_path: Path) -> None:
    before = SqliteLightningStore(tmp_path / "store.db")
    done = await before.start_rollout("done")
    await before.update_attempt(done.rollout_id, "latest", status="succeeded")
    queued = await before.enqueue_rollout("queued")
    await before.close()

    after = SqliteLightningStore(tmp_path / "store.db")

    claimed = await _claimed(after)
    found = await after.get_rollout_by_id(done.rollout_id)
    assert claimed.rollout_id == queued.rollout_id
    assert found is not None
    assert found.status == "succeeded"
    await after.close()


@pytest.mark.claim(260)
async def test_a_store_in_memory_hands_over_objects_that_json_cannot_hold() -> None:
    store = InMemoryLightningStore()

    queued = await store.enqueue_rollout({"set": {1, 2}})

    assert (await _claimed(store)).input == {"set": {1, 2}}
    assert queued.input == {"set": {1, 2}}
