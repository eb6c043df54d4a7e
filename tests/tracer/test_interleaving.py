"""Many rollouts at once in one process: every span lands on its own rollout, and on no other."""

import _thread
import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace

from agentlightning.emitter import emit_message
from agentlightning.errors import ConfigurationError
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer, get_active_tracer
from agentlightning.types import AttemptedRollout

ROLLOUTS = 16
STEPS = 3


def say(rollout: AttemptedRollout, where: str) -> None:
    with trace.get_tracer("agent").start_as_current_span(f"{where} of {rollout.rollout_id}"):
        emit_message(rollout.rollout_id)


async def agent(rollout: AttemptedRollout) -> None:
    """Works in its task, in tasks of its own, and in threads that carry its context."""
    for _ in range(STEPS):
        say(rollout, "task")
        await asyncio.sleep(0)
    await asyncio.gather(*(asyncio.create_task(in_task(rollout)) for _ in range(2)))
    await asyncio.to_thread(say, rollout, "to_thread")
    thread = threading.Thread(target=contextvars.copy_context().run, args=(say, rollout, "thread"))
    thread.start()
    await asyncio.to_thread(thread.join)


async def in_task(rollout: AttemptedRollout) -> None:
    await asyncio.sleep(0)
    say(rollout, "subtask")


SPANS_OF_AN_AGENT = 2 * (STEPS + 2 + 1 + 1)


async def check(store: InMemoryLightningStore, rollouts: list[AttemptedRollout], expected: int) -> None:
    for rollout in rollouts:
        spans = await store.query_spans(rollout.rollout_id)
        said = [span.attributes["message"] for span in spans if span.name == "agentlightning.message"]
        assert len(spans) == expected
        assert set(said) == {rollout.rollout_id}
        assert sorted(span.sequence_id for span in spans) == list(range(1, expected + 1))


async def test_rollouts_in_tasks_and_threads_do_not_mix(store: InMemoryLightningStore, tracer: OtelTracer) -> None:
    rollouts = [await store.start_rollout(number) for number in range(ROLLOUTS)]

    async def run(rollout: AttemptedRollout) -> None:
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context(store=store, **ids):
            await agent(rollout)
        assert len(tracer.get_last_trace()) == SPANS_OF_AN_AGENT
        assert tracer.get_last_losses().count == 0

    in_tasks, in_threads = rollouts[: ROLLOUTS // 2], rollouts[ROLLOUTS // 2 :]
    with ThreadPoolExecutor(ROLLOUTS // 2) as pool:
        loop = asyncio.get_running_loop()
        runs = [loop.run_in_executor(pool, asyncio.run, run(rollout)) for rollout in in_threads]
        await asyncio.gather(*(run(rollout) for rollout in in_tasks), *runs)

    await check(store, rollouts, SPANS_OF_AN_AGENT)


async def test_rollouts_of_several_tracers_do_not_mix(store: InMemoryLightningStore) -> None:
    rollouts = [await store.start_rollout(number) for number in range(8)]

    def work(rollout: AttemptedRollout) -> None:
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        with OtelTracer(instrument=False).lifespan() as tracer, tracer._trace_context_sync(store=store, **ids):
            for _ in range(STEPS):
                say(rollout, "worker")

    with ThreadPoolExecutor(8) as pool:
        await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(pool, work, r) for r in rollouts))

    await check(store, rollouts, 2 * STEPS)


def in_bare_thread(rollout: AttemptedRollout) -> None:
    thread = threading.Thread(target=say, args=(rollout, "bare thread"))
    thread.start()
    thread.join()


async def test_a_bare_thread_belongs_to_the_only_rollout(store: InMemoryLightningStore, tracer: OtelTracer) -> None:
    rollout = await store.start_rollout("task")
    async with tracer.trace_context(store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        in_bare_thread(rollout)
    await check(store, [rollout], 2)


async def test_a_bare_thread_beside_two_rollouts_belongs_to_none(tracer: OtelTracer) -> None:
    rollout = await InMemoryLightningStore().start_rollout("task")
    done = asyncio.Event()

    async def idle() -> int:
        async with tracer.trace_context() as recorder:
            await done.wait()
        return len(recorder.spans())

    tasks = [asyncio.create_task(idle()) for _ in range(2)]
    await asyncio.sleep(0)
    in_bare_thread(rollout)
    done.set()

    assert await asyncio.gather(*tasks) == [0, 0]


async def test_a_span_belongs_to_the_rollout_of_its_open_parent(tracer: OtelTracer) -> None:
    async with tracer.trace_context() as recorder:
        with trace.get_tracer("agent").start_as_current_span("parent") as parent:
            await asyncio.to_thread(contextvars.Context().run, beside_another_rollout, parent)
    assert [span.name for span in recorder.spans()] == ["child", "parent"]


def beside_another_rollout(parent: trace.Span) -> None:
    """In a thread that inherited nothing, while two rollouts run, so that the parent is the only thing to go by."""
    is_done = threading.Event()

    def work() -> None:
        trace.get_tracer("agent").start_span("child", context=trace.set_span_in_context(parent)).end()
        is_done.set()

    with OtelTracer(instrument=False).lifespan() as other, other._trace_context_sync() as recorder:
        _thread.start_new_thread(work, ())
        assert is_done.wait(10)
    assert recorder.spans() == []


async def test_a_span_belongs_to_where_it_began_wherever_it_ends(tracer: OtelTracer) -> None:
    async with tracer.trace_context() as recorder:
        span = trace.get_tracer("agent").start_span("long")
    span.end()
    assert [span.name for span in recorder.spans()] == ["long"]


async def test_traces_do_not_nest(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        with pytest.raises(ConfigurationError, match="do not nest"):
            async with tracer.trace_context():
                pass

        assert get_active_tracer() is tracer
    assert get_active_tracer() is None
