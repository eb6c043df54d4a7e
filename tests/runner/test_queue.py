"""Working off the queue: how many at once, for how long, and how a runner pauses and stops without losing a rollout."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning.emitter import emit_message
from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.execution import ThreadingEvent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStoreThreaded
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.types import Hook
from agentlightning.types.lifecycle import LifecycleState
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering, Awaiting, stocked_store, until, work_off

QUIET: dict[str, Any] = {"poll_interval": 0.05, "heartbeat_interval": 0}


def quick_runner(**options: Any) -> LitAgentRunner[Any]:
    return LitAgentRunner(DummyTracer(), **{**QUIET, **options})


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_rollouts_are_claimed_than_asked_for(concurrency: int) -> None:
    store = await stocked_store()
    for number in range(10):
        await store.enqueue_rollout(number)

    await work_off(Answering(lambda _: 1.0), "last", store=store, max_rollouts=5, max_concurrency=concurrency)

    assert Counter(r.status for r in await store.query_rollouts()) == {"succeeded": 5, "queuing": 6}


def test_a_runner_that_runs_nothing_at_once_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_concurrency must be at least 1"):
        quick_runner(max_concurrency=0)


# ---------------------------------------------------------------------- many at once


async def test_plain_agents_run_together_in_threads_up_to_the_limit() -> None:
    meeting = threading.Barrier(8)
    counting = threading.Lock()
    running = most = 0

    def answer(_: Any) -> float:
        nonlocal running, most
        with counting:
            running += 1
            most = max(most, running)
        meeting.wait(PATIENCE_SECONDS)
        with counting:
            running -= 1
        return 1.0

    worked = await work_off(Answering(answer), *range(32), max_concurrency=8)

    assert most == 8
    assert set(await worked.statuses()) == {"succeeded"}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
async def test_no_span_goes_to_another_rollout(is_async: bool) -> None:
    async def later(task: Any) -> float:
        for number in range(5):
            emit_message(f"{task}:{number}")
            await asyncio.sleep(0.001)
        return float(task)

    def at_once(task: Any) -> float:
        return asyncio.run(later(task))

    agent = Awaiting(later) if is_async else Answering(at_once)
    worked = await work_off(agent, *range(40), max_concurrency=16, tracer=OtelTracer())

    for number, rollout_id in enumerate(worked.rollout_ids):
        spans = await worked.store.query_spans(rollout_id)
        messages = [str(span.attributes["message"]) for span in spans if "message" in span.attributes]
        assert messages == [f"{number}:{position}" for position in range(5)]
        assert await worked.rewards(number) == [float(number)]


async def test_hooks_get_the_spans_of_their_own_rollout() -> None:
    seen: dict[Any, list[str]] = {}

    class Looking(Hook):
        async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Sequence[Any]) -> None:
            seen[rollout.input] = [str(span.attributes["message"]) for span in spans if "message" in span.attributes]

    async def answer(task: Any) -> None:
        emit_message(f"{task}")
        await asyncio.sleep(0.01)

    await work_off(Awaiting(answer), *range(20), max_concurrency=8, hooks=[Looking()])

    assert seen == {number: [str(number)] for number in range(20)}


# ---------------------------------------------------------------------- pausing and stopping


async def test_a_stopped_runner_finishes_what_it_runs_and_claims_nothing_more() -> None:
    store = await stocked_store()
    release, started = asyncio.Event(), asyncio.Event()

    async def answer(_: Any) -> float:
        started.set()
        await release.wait()
        return 1.0

    for number in range(3):
        await store.enqueue_rollout(number)
    runner = quick_runner()
    with runner.run_context(agent=Awaiting(answer), store=store):
        work = asyncio.create_task(runner.iter())
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        runner.stop()
        release.set()
        await asyncio.wait_for(work, PATIENCE_SECONDS)

    assert Counter(r.status for r in await store.query_rollouts()) == {"succeeded": 1, "queuing": 2}


async def test_a_runner_that_stopped_can_be_used_again() -> None:
    store = await stocked_store()
    runner = quick_runner()

    with runner.run_context(agent=Answering(lambda _: 1.0), store=store):
        for _round in range(2):
            event = ThreadingEvent()
            work = asyncio.create_task(runner.iter(event=event))
            rollout = await store.enqueue_rollout("task")
            assert await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=PATIENCE_SECONDS)
            event.set()
            await asyncio.wait_for(work, PATIENCE_SECONDS)
            assert runner.state is LifecycleState.READY

    assert runner.state is LifecycleState.STOPPED


async def test_an_idle_runner_stops_soon_when_it_is_told() -> None:
    event = ThreadingEvent()
    runner = quick_runner(poll_interval=60.0)

    with runner.run_context(agent=Answering(lambda _: 1.0), store=await stocked_store()):
        work = asyncio.create_task(runner.iter(event=event))
        await until(lambda: runner.state is LifecycleState.RUNNING)
        event.set()
        await asyncio.wait_for(work, 10)


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_no_rollout_is_lost_when_a_runner_stops_as_it_claims(concurrency: int) -> None:
    store = LightningStoreThreaded(InMemoryLightningStore())
    await store.add_resources(RESOURCES)

    for round_number in range(21):
        event = ThreadingEvent()
        runner = quick_runner(poll_interval=5.0, max_concurrency=concurrency)
        with runner.run_context(agent=Answering(lambda _: 1.0), store=store):
            work = asyncio.create_task(runner.iter(event=event))
            await asyncio.sleep(0.001 * (round_number % 7))
            asyncio.get_running_loop().call_later(0.0005 * (round_number % 5), event.set)
            await store.enqueue_rollout(round_number)
            await asyncio.wait_for(work, PATIENCE_SECONDS)

    left = Counter(rollout.status for rollout in await store.query_rollouts())
    assert set(left) <= {"queuing", "succeeded"}, left


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_runner_that_is_cancelled_gives_up_its_attempts(concurrency: int) -> None:
    store = await stocked_store()
    started: list[Any] = []

    async def answer(task: Any) -> float:
        started.append(task)
        await asyncio.sleep(1000)
        return 1.0

    for number in range(concurrency):
        await store.enqueue_rollout(number)
    runner = quick_runner(max_concurrency=concurrency)
    with runner.run_context(agent=Awaiting(answer), store=store):
        work = asyncio.create_task(runner.iter())
        await until(lambda: len(started) == concurrency)
        work.cancel()
        await asyncio.wait([work], timeout=PATIENCE_SECONDS)

    attempts = [await store.get_latest_attempt(r.rollout_id) for r in await store.query_rollouts()]
    assert [attempt and attempt.status for attempt in attempts] == ["unresponsive"] * concurrency
    assert work.cancelled()


async def test_an_outage_of_the_store_is_ridden_out() -> None:
    class Wobbly(InMemoryLightningStore):
        """Cannot be reached for the first few claims."""

        outages = 3

        async def claim_rollouts(self, *args: Any, **kwargs: Any) -> Any:
            if self.outages > 0:
                self.outages -= 1
                raise StoreUnavailable("The store cannot be reached.")
            return await super().claim_rollouts(*args, **kwargs)

    store = Wobbly()
    await store.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda _: 1.0), store=store)

    assert (await worked.statuses(), store.outages) == (["succeeded"], 0)


async def test_a_status_that_cannot_be_written_does_not_end_the_runner(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(InMemoryLightningStore):
        """Cannot be told how the first attempt ended."""

        lost = ""

        async def finish_attempt(self, rollout_id: str, *args: Any, **kwargs: Any) -> Any:
            self.lost = self.lost or rollout_id
            if rollout_id == self.lost:
                raise StoreUnavailable("gone")
            return await super().finish_attempt(rollout_id, *args, **kwargs)

        async def finish_and_claim(self, *args: Any, **kwargs: Any) -> Any:
            raise StoreUnavailable("gone")

    store = Forgetful()
    await store.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda _: 1.0), "one", "two", store=store)

    assert (await worked.statuses())[1] == "succeeded"
    assert "could not be written" in caplog.text


async def test_attempts_are_given_up_in_order_when_every_task_of_the_loop_is_cancelled() -> None:
    class Slow(InMemoryLightningStore):
        async def finish_attempt(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().finish_attempt(*args, **kwargs)

    store, started = Slow(), asyncio.Event()
    await store.add_resources(RESOURCES)

    async def answer(_: Any) -> float:
        started.set()
        await asyncio.sleep(1000)
        return 1.0

    rollout = await store.enqueue_rollout("task")
    runner, this = quick_runner(), asyncio.current_task()
    with runner.run_context(agent=Awaiting(answer), store=store):
        work = asyncio.create_task(runner.iter())
        await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
        for task in asyncio.all_tasks() - {this}:
            task.cancel()
        await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work], timeout=PATIENCE_SECONDS)

    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert (work.cancelled(), attempt.status) == (True, "unresponsive")
