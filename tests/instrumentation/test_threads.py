"""Threads and pools belong to whoever starts them: no span is missing, and none lands on another rollout."""

import asyncio
import concurrent.futures
import concurrent.futures.process
import contextvars
import dataclasses
import gc
import multiprocessing.pool
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from agentlightning.instrumentation.redirect import Target, current_router, redirected
from agentlightning.instrumentation.threads import ThreadContextPatch
from agentlightning.tracer import OtelTracer
from agentlightning.tracer.binding import CARRIED, Recorder, current_binding, unobserved

OTEL = trace.get_tracer("agent")
OTHER: contextvars.ContextVar[str] = contextvars.ContextVar("other", default="as it was")
ORIGINALS = threading.Thread.start, ThreadPoolExecutor.submit


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    with OtelTracer(instrument=False).lifespan() as tracer:
        yield tracer


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Shared by everyone, as one at the top of a module would be."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def mark(name: str) -> None:
    OTEL.start_span(name).end()


def names(recorder: Recorder) -> list[str]:
    return sorted(span.name for span in recorder.spans())


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# ---------------------------------------------------------------------- ways to start a thread


class Running(threading.Thread):
    """Overrides `run`, as the documentation shows."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work

    def run(self) -> None:
        self.work()


class Starting(Running):
    def start(self) -> None:
        self.was_started = True
        super().start()


@dataclasses.dataclass
class Unhashable:
    """A callable that can be compared, and so has no hash."""

    work: Callable[[], Any]

    def __call__(self) -> None:
        self.work()


def bare(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    in_thread(work)


def subclass(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    for kind in (Running, Starting):
        thread = kind(lambda: None)
        thread.work = work if kind is Running else lambda: None
        thread.start()
        thread.join()


def timer(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    thread = threading.Timer(0.001, work)
    thread.start()
    thread.join()


def unhashable(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    in_thread(Unhashable(work))


def nested(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    in_thread(lambda: in_thread(lambda: in_thread(work)))


def shared_pool(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    pool.submit(work).result()


def own_pool(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    with ThreadPoolExecutor(1) as own:
        own.submit(work).result()


def thread_in_pool(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    pool.submit(in_thread, work).result()


def from_loop(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    async def run() -> None:
        await asyncio.get_running_loop().run_in_executor(pool, work)

    asyncio.run(run())


def to_thread(work: Callable[[], Any], pool: ThreadPoolExecutor) -> None:
    asyncio.run(asyncio.to_thread(work))


WAYS = (bare, subclass, timer, unhashable, nested, shared_pool, own_pool, thread_in_pool, from_loop, to_thread)


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_belongs_to_the_rollout_that_starts_it(
    tracer: OtelTracer, pool: ThreadPoolExecutor, way: Callable[..., None]
) -> None:
    with OtelTracer(instrument=False).lifespan() as other:  # so that there is no only rollout to fall back to
        ready, done = threading.Event(), threading.Event()

        def beside() -> None:
            with other._trace_context_sync() as recorder:
                ready.set()
                done.wait(10)
            assert names(recorder) == []

        neighbour = threading.Thread(target=beside)
        neighbour.start()
        ready.wait(10)
        with tracer._trace_context_sync() as recorder, OTEL.start_as_current_span("agent") as agent:
            way(lambda: mark("work"), pool)
        done.set()
        neighbour.join()

    assert names(recorder) == ["agent", "work"]
    [work] = [span for span in recorder.spans() if span.name == "work"]
    assert work.parent is not None
    assert work.parent.span_id == agent.get_span_context().span_id


def test_16_rollouts_at_once_do_not_mix(tracer: OtelTracer, pool: ThreadPoolExecutor) -> None:
    traces: dict[int, Recorder] = {}
    begin = threading.Barrier(16)
    ways = (bare, nested, shared_pool, own_pool, thread_in_pool, to_thread)

    def rollout(number: int) -> None:
        begin.wait(60)
        with tracer._trace_context_sync() as traces[number]:
            for way in ways:
                way(lambda: mark(f"{number}"), pool)
                mark(f"{number}")

    threads = [threading.Thread(target=rollout, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = {number: Counter(names(recorder)) for number, recorder in traces.items()}
    assert found == {number: Counter({f"{number}": 2 * len(ways)}) for number in range(16)}


# ---------------------------------------------------------------------- who shares what


def test_a_pool_made_in_one_rollout_serves_another(tracer: OtelTracer) -> None:
    with tracer._trace_context_sync() as first:
        pool = ThreadPoolExecutor(1)
        pool.submit(mark, "first").result()
    with tracer._trace_context_sync() as second:
        pool.submit(mark, "second").result()
    pool.submit(mark, "nobody's").result()
    pool.shutdown()

    assert (names(first), names(second)) == (["first"], ["second"])


def test_a_thread_pool_of_multiprocessing_belongs_to_nobody(tracer: OtelTracer) -> None:
    """Its threads cannot tell whose work they do, so that they must not say it is their maker's."""
    others = OtelTracer(instrument=False)
    with tracer._trace_context_sync() as first:
        pool = multiprocessing.pool.ThreadPool(1)
    with others.lifespan(), others._trace_context_sync() as second:
        pool.apply_async(mark, ("second",), callback=lambda _: mark("told")).get()
        pool.close()
        pool.join()

    assert (names(first), names(second)) == ([], ["second", "told"])


def test_callbacks_of_a_process_pool_are_not_its_makers(tracer: OtelTracer) -> None:
    started: list[Any] = []

    class Servant(threading.Thread):
        """As the thread that waits for the processes of a pool."""

        __module__ = "concurrent.futures.process"

        def run(self) -> None:
            started.append(current_binding())

    with tracer._trace_context_sync():
        servant = Servant()
        servant.start()
        servant.join()

    assert started == [None]
    assert concurrent.futures.process._ExecutorManagerThread.__module__ == Servant.__module__


def test_a_thread_that_outlives_its_rollout_does_not_touch_the_next(tracer: OtelTracer) -> None:
    go_on, is_done = threading.Event(), threading.Event()

    def linger() -> None:
        mark("in time")
        go_on.wait(10)
        mark("late")
        is_done.set()

    with tracer._trace_context_sync() as first:
        threading.Thread(target=linger).start()
    with tracer._trace_context_sync() as second:
        go_on.set()
        assert is_done.wait(10)

    assert names(second) == []
    assert "in time" in names(first)


def test_unobserved_code_stays_unobserved_in_its_threads(tracer: OtelTracer, pool: ThreadPoolExecutor) -> None:
    with tracer._trace_context_sync() as recorder:
        with unobserved():
            for way in WAYS:
                way(lambda: mark("hidden"), pool)
        pool.submit(mark, "seen").result()

    assert names(recorder) == ["seen"]


def test_a_thread_of_a_pool_forgets_whom_it_served(tracer: OtelTracer) -> None:
    def careless() -> None:
        otel_context.attach(trace.set_span_in_context(OTEL.start_span("left open")))  # and never detached

    with ThreadPoolExecutor(1) as pool:
        with tracer._trace_context_sync():
            pool.submit(careless).result()
        assert pool.submit(current_binding).result() is None
        assert not pool.submit(trace.get_current_span).result().get_span_context().is_valid


def test_other_context_variables_are_left_as_python_leaves_them(tracer: OtelTracer, pool: ThreadPoolExecutor) -> None:
    seen: list[str] = []
    with tracer._trace_context_sync():
        OTHER.set("changed")
        in_thread(lambda: seen.append(OTHER.get()))
        seen.append(pool.submit(OTHER.get).result())

    assert seen == ["as it was", "as it was"]


def test_a_router_goes_along(tracer: OtelTracer, pool: ThreadPoolExecutor) -> None:
    class Router(dict[str, str]):
        """Empty, and so false, as objects of users may be."""

        def __call__(self, _: Any) -> Target | None:
            return None

    router, seen = Router(), []
    with redirected(router):
        in_thread(lambda: seen.append(current_router()))
        seen.append(pool.submit(current_router).result())

    assert [found is router for found in seen] == [True, True]
    assert pool.submit(current_router).result() is None


# ---------------------------------------------------------------------- nothing is changed


def test_a_thread_is_not_kept_longer_than_without_us(tracer: OtelTracer) -> None:
    gc.collect()
    gc.disable()
    try:
        with tracer._trace_context_sync():
            thread = threading.Thread(target=mark, args=("work",))
            thread.start()
            thread.join()
            forgotten = weakref.ref(thread)
            del thread
        assert forgotten() is None
    finally:
        gc.enable()


def test_a_run_that_was_given_to_one_thread_stays(tracer: OtelTracer) -> None:
    thread, seen = threading.Thread(), []
    thread.run = own = lambda: seen.append(current_binding())  # type: ignore[method-assign]

    with tracer._trace_context_sync():
        thread.start()
        thread.join()

    assert (thread.run, len(seen), seen[0] is None) == (own, 1, False)


def test_threads_outside_of_rollouts_are_not_touched(tracer: OtelTracer) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert "run" not in vars(thread)


def test_undoing_restores_both_methods() -> None:
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == ORIGINALS
    with ThreadContextPatch(CARRIED):
        assert threading.Thread.start is not ORIGINALS[0]
        assert ThreadPoolExecutor.submit is not ORIGINALS[1]
    with OtelTracer().lifespan(), OtelTracer().lifespan():
        assert threading.Thread.start is not ORIGINALS[0]

    assert (threading.Thread.start, ThreadPoolExecutor.submit) == ORIGINALS
