"""Signs of life of a worker, and what the store shows of it."""

import asyncio
import threading
import time
from typing import Any

import pytest

from agentlightning.execution import ThreadingEvent
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.heartbeat import Heartbeat
from agentlightning.store import InMemoryLightningStore, LightningStoreThreaded
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.types import Worker
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering, Awaiting, stocked_store, until, work_off


def beating_runner(mode: Any) -> LitAgentRunner[Any]:
    options: dict[str, Any] = {"poll_interval": 0.05, "heartbeat_interval": 0.05, "interval_jitter": 0.01}
    return LitAgentRunner(DummyTracer(), heartbeat_launch_mode=mode, **options)


async def seen_worker(store: Any, name: str = "Worker-0") -> Worker:
    workers = await store.query_workers(worker_id_contains=f"{name}@")
    return workers[0] if workers else Worker(worker_id="none")


@pytest.mark.parametrize("mode", ["thread", "asyncio"])
async def test_a_worker_tells_of_itself_while_it_is_idle_and_until_it_ends(mode: str) -> None:
    store = LightningStoreThreaded(await stocked_store())
    event = ThreadingEvent()
    runner = beating_runner(mode)

    with runner.run_context(agent=Answering(lambda _: None), store=store):
        work = asyncio.create_task(runner.iter(event=event))

        async def has_beaten() -> bool:
            return (await seen_worker(store)).heartbeat_stats is not None

        await until(has_beaten)
        event.set()
        await asyncio.wait_for(work, PATIENCE_SECONDS)

    stats = (await seen_worker(store)).heartbeat_stats
    assert stats is not None
    assert {"timestamp", "host", "cpu_usage_pct", "mem_pct", "disk_pct"} <= set(stats)
    await until(lambda: not any("heartbeat-Worker-0" in task.get_name() for task in asyncio.all_tasks()))
    assert not any("heartbeat-Worker-0" in thread.name for thread in threading.enumerate())


async def test_heartbeats_go_on_while_an_agent_blocks_the_loop() -> None:
    beats: list[float] = []

    class Counting(LightningStoreThreaded):
        async def update_worker(self, *args: Any, **kwargs: Any) -> Any:
            beats.append(time.monotonic())
            return await super().update_worker(*args, **kwargs)

    async def answer(_: Any) -> float:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(beats) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)  # noqa: ASYNC251 # that is what is wrong with it
        return 1.0

    await work_off(Awaiting(answer), store=Counting(await stocked_store()), heartbeat_interval=0.05)

    assert len(beats) >= 3


async def test_no_heartbeats_may_be_asked_for() -> None:
    worked = await work_off(Answering(lambda _: None), heartbeat_interval=0)

    assert (await seen_worker(worked.store)).last_heartbeat_time is None


async def test_heartbeats_that_do_not_arrive_are_told_once_and_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    class Deaf(InMemoryLightningStore):
        async def update_worker(self, *args: Any, **kwargs: Any) -> Any:
            tries.append(1)
            raise ConnectionError("deaf")

    store, event, runner = Deaf(), ThreadingEvent(), beating_runner("thread")

    with runner.run_context(agent=Answering(lambda _: None), store=store):
        work = asyncio.create_task(runner.iter(event=event))
        await until(lambda: len(tries) >= 3)
        event.set()
        await asyncio.wait_for(work, PATIENCE_SECONDS)

    assert caplog.text.count("did not reach the store") == 1


async def test_a_snapshot_that_takes_for_ever_does_not_keep_the_runner_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave = threading.Event()
    monkeypatch.setattr("agentlightning.runner.heartbeat.system_snapshot", lambda _: leave.wait() or {})
    store = await stocked_store()
    beat = Heartbeat(interval_seconds=0.01, jitter_seconds=0.0)

    began = time.monotonic()
    with beat.beating(store, "Worker-0"):
        await asyncio.sleep(0.1)
    took = time.monotonic() - began
    leave.set()

    assert took < 10


async def test_agents_whose_attempts_are_lost_are_cancelled_and_the_runner_goes_on() -> None:
    store, begun, cancelled = InMemoryLightningStore(), list[str](), list[str]()
    await store.add_resources(RESOURCES)

    async def answer(task: Any) -> float:
        begun.append(task)
        if task == "kept":
            return 1.0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(task)
            raise
        return 0.0

    lost = await store.enqueue_rollout("lost")
    runner: LitAgentRunner[Any] = LitAgentRunner(
        OtelTracer(), heartbeat_interval=0.02, interval_jitter=0.0, poll_interval=0.05, max_rollouts=2
    )
    with runner.run_context(agent=Awaiting(answer), store=store):
        running = asyncio.create_task(runner.iter())
        await until(lambda: begun == ["lost"])
        await store.mark_worker_lost(runner.get_store_worker_id(), "it was taken for dead")
        other = await store.dequeue_rollout("other")
        await store.enqueue_rollout("kept")
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert other is not None
    assert (begun, cancelled) == (["lost", "kept"], ["lost"])
    first, second = await store.query_attempts(lost.rollout_id)
    assert ((first.metadata or {})["error"]["message"], second.status) == ("it was taken for dead", "preparing")
    assert list(await store.query_spans(lost.rollout_id)) == []


async def test_the_agent_of_a_cancelled_rollout_is_cancelled_and_the_rollout_stays_as_it_is() -> None:
    store, begun = InMemoryLightningStore(), list[str]()
    await store.add_resources(RESOURCES)

    async def answer(task: Any) -> float:
        begun.append(task)
        if task == "endless":
            await asyncio.Event().wait()
        return 1.0

    endless = await store.enqueue_rollout("endless")
    runner: LitAgentRunner[Any] = LitAgentRunner(
        DummyTracer(), heartbeat_interval=0.02, interval_jitter=0.0, poll_interval=0.05, max_rollouts=2
    )
    with runner.run_context(agent=Awaiting(answer), store=store):
        running = asyncio.create_task(runner.iter())
        await until(lambda: begun == ["endless"])
        await store.update_rollout(endless.rollout_id, status="cancelled")
        await store.enqueue_rollout("next")
        await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert [rollout.status for rollout in await store.query_rollouts()] == ["cancelled", "succeeded"]
