"""What every tracer of ours promises: traces, spans, the active tracer, listeners, and the provider of the process."""

import asyncio
import pickle
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace

from agentlightning.errors import ConfigurationError, TracingError
from agentlightning.instrumentation.imports import is_installed
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import (
    AgentOpsTracer,
    DummyTracer,
    OtelTracer,
    Tracer,
    clear_active_tracer,
    get_active_tracer,
    set_active_tracer,
)
from agentlightning.tracer.recording import RecordingTracer
from agentlightning.types import Span, TraceStatus
from tests import warm_python
from tests.tracer.conftest import TroubledStore, refuse_the_bad

KINDS = {"otel": OtelTracer, "agentops": AgentOpsTracer, "dummy": DummyTracer}


@pytest.fixture(params=KINDS)
def any_tracer(request: pytest.FixtureRequest) -> Iterator[RecordingTracer]:
    with KINDS[request.param]().lifespan() as tracer:
        yield tracer


def names(tracer: Tracer) -> list[str]:
    return [span.name for span in tracer.get_last_trace()]


async def test_a_trace_holds_the_spans_that_ended_inside(any_tracer: RecordingTracer) -> None:
    any_tracer.create_span("before")
    async with any_tracer.trace_context() as recorder:
        any_tracer.create_span("inside")

    assert names(any_tracer) == ["inside"]
    assert recorder.spans() == any_tracer.get_last_trace()


async def test_a_bound_trace_is_in_the_store_when_it_is_left(
    any_tracer: RecordingTracer, store: InMemoryLightningStore
) -> None:
    rollout = await store.start_rollout("task")

    async with any_tracer.trace_context(
        store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
    ):
        any_tracer.create_span("one", {"number": 1})
        with any_tracer.operation_context("two") as operation:
            operation.record_attributes({"tokens": [1, 2]})

    one, two = await store.query_spans(rollout.rollout_id)
    assert (one.name, one.attributes, one.sequence_id) == ("one", {"number": 1}, 1)
    assert (two.name, two.attributes, two.attempt_id) == ("two", {"tokens": [1, 2]}, rollout.attempt.attempt_id)


async def test_the_store_may_come_from_init_worker(store: InMemoryLightningStore) -> None:
    rollout = await store.start_rollout("task")

    with OtelTracer().lifespan(store) as tracer:
        async with tracer.trace_context(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
            tracer.create_span("one")

    assert [span.name for span in await store.query_spans(rollout.rollout_id)] == ["one"]


def test_a_trace_needs_no_event_loop(any_tracer: RecordingTracer, store: InMemoryLightningStore) -> None:
    rollout = asyncio.run(store.start_rollout("task"))
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}

    with any_tracer._trace_context_sync(store=store, **ids):
        any_tracer.create_span("one")

    assert len(asyncio.run(store.query_spans(rollout.rollout_id))) == 1


async def test_what_is_lost_is_told_with_the_trace(tracer: OtelTracer) -> None:
    store = TroubledStore(refuse_the_bad)
    rollout = await store.start_rollout("task")

    async with tracer.trace_context(store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        tracer.create_span("bad")

    assert tracer.get_last_losses().count == 1


async def test_an_agent_that_fails_is_recorded_and_its_error_passes(any_tracer: RecordingTracer) -> None:
    async def agent() -> None:
        with any_tracer.operation_context("step"):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await any_tracer.trace_run_async(agent)

    (span,) = any_tracer.get_last_trace()
    assert (span.name, span.status.status_code.name, span.status.description) == ("step", "ERROR", "ValueError: no")
    assert get_active_tracer() is None


@pytest.mark.parametrize("missing", ["store", "rollout_id", "attempt_id"])
async def test_a_half_bound_trace_is_refused(tracer: OtelTracer, store: InMemoryLightningStore, missing: str) -> None:
    given = {"store": store, "rollout_id": "ro-1", "attempt_id": "at-1"}
    del given[missing]

    with pytest.raises(ValueError, match=f"{missing} is missing"):
        async with tracer.trace_context(**given):  # type: ignore[arg-type] # one of them is not there
            pass


async def test_a_tracer_must_be_initialised() -> None:
    with pytest.raises(RuntimeError, match="call init_worker"):
        async with OtelTracer().trace_context():
            pass
    with pytest.raises(TracingError, match="recorded nothing"):
        OtelTracer().get_last_trace()


async def test_functions_are_traced_by_name(any_tracer: RecordingTracer) -> None:
    def work(number: int) -> int:
        any_tracer.create_span("sync")
        return number + 1

    async def work_async(number: int) -> int:
        any_tracer.create_span("async")
        return number + 2

    assert any_tracer.trace_run(work, 1) == 2
    assert names(any_tracer) == ["sync"]
    assert await any_tracer.trace_run_async(work_async, number=1) == 3
    assert names(any_tracer) == ["async"]


def test_a_span_may_be_given_its_time_and_status(any_tracer: RecordingTracer) -> None:
    status = TraceStatus(status_code="ERROR", description="no")

    core = any_tracer.create_span("one", {"a": 1}, timestamp=1_700_000_000.5, status=status)

    assert (core.start_time, core.end_time) == (1_700_000_000.5, 1_700_000_000.5)
    assert (core.status.status_code, core.status.description) == ("ERROR", "no")
    assert core.attributes == {"a": 1}


async def test_children_begin_under_the_operation_around_them(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        with tracer.operation_context("parent", start_time=1.0, end_time=2.0):
            tracer.create_span("child")

    child, parent = tracer.get_last_trace()
    assert child.parent is not None
    assert child.parent.span_id == parent.context.span_id
    assert parent.end_time == 2 * 10**9


async def test_a_listener_gets_every_trace(any_tracer: RecordingTracer) -> None:
    heard: list[list[Span]] = []
    any_tracer.add_listener(heard.append)

    async with any_tracer.trace_context():
        any_tracer.create_span("one")
    any_tracer.remove_listener(heard.append)
    async with any_tracer.trace_context():
        any_tracer.create_span("two")

    assert [[span.name for span in spans] for spans in heard] == [["one"]]


async def test_a_listener_that_fails_harms_nobody(
    any_tracer: RecordingTracer, caplog: pytest.LogCaptureFixture
) -> None:
    any_tracer.add_listener(lambda spans: 1 / 0)
    async with any_tracer.trace_context():
        any_tracer.create_span("one")
    assert "A listener" in caplog.text


def test_the_active_tracer_is_set_once() -> None:
    first, second = DummyTracer(), DummyTracer()

    set_active_tracer(first)
    with pytest.raises(ConfigurationError, match="already the active tracer"):
        set_active_tracer(second)
    clear_active_tracer()

    assert get_active_tracer() is None


def test_a_tracer_travels_as_it_was_before_init_worker(any_tracer: RecordingTracer) -> None:
    copy = pickle.loads(pickle.dumps(any_tracer))
    assert type(copy) is type(any_tracer)
    assert not copy._is_ready


def shipping_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "agl-span-shipper"]


def test_a_tracer_leaves_no_thread_behind(store: InMemoryLightningStore) -> None:
    rollout = asyncio.run(store.start_rollout("task"))
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    before = shipping_threads()

    with OtelTracer().lifespan() as tracer, tracer._trace_context_sync(store=store, **ids):
        tracer.create_span("one")
        assert len(shipping_threads()) == len(before) + 1

    assert shipping_threads() == before


# ---------------------------------------------------------------------- the provider, which a process has once


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = warm_python.run(command, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_our_provider_is_installed_where_there_is_none() -> None:
    told = run_python("""
        from opentelemetry import trace
        from agentlightning.tracer import OtelTracer
        first, second = OtelTracer(), OtelTracer()
        first.init_worker(0)
        second.init_worker(1)
        second.init_worker(1)
        with second._trace_context_sync():
            with trace.get_tracer("agent").start_as_current_span("one") as span:
                span.set_attributes({f"key {number}": number for number in range(300)})
        (span,) = second.get_last_trace()
        print(span.name, len(span.attributes))
    """)

    assert told == "one 300\n"


def test_a_provider_of_the_users_keeps_its_processors() -> None:
    told = run_python("""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        provider, exporter = TracerProvider(), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        from agentlightning.tracer import OtelTracer
        with OtelTracer().lifespan() as tracer, tracer._trace_context_sync():
            trace.get_tracer("agent").start_span("one").end()
        assert trace.get_tracer_provider() is provider
        print(len(tracer.get_last_trace()), len(exporter.get_finished_spans()))
    """)

    assert told == "1 1\n"


def test_a_provider_that_takes_no_processor_is_named() -> None:
    told = run_python("""
        from opentelemetry import trace
        trace.set_tracer_provider(trace.NoOpTracerProvider())
        from agentlightning.errors import TracingError
        from agentlightning.tracer import OtelTracer
        try:
            OtelTracer().init_worker(0)
        except TracingError as error:
            print(error)
    """)

    assert "NoOpTracerProvider, to which no span processor can be added" in told


def test_a_forked_child_delivers_its_own_spans() -> None:
    told = run_python("""
        import asyncio, os, sys
        from agentlightning.store import InMemoryLightningStore
        from agentlightning.tracer import OtelTracer
        store = InMemoryLightningStore()
        rollout = asyncio.run(store.start_rollout("task"))
        tracer = OtelTracer()
        tracer.init_worker(0)
        def trace(name):
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            with tracer._trace_context_sync(store=store, **ids):
                tracer.create_span(name)
            return [span.name for span in asyncio.run(store.query_spans(rollout.rollout_id))]
        trace("parent")
        child = os.fork()
        if child == 0:
            print(trace("child"), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(trace("parent again"))
    """)

    assert told == "['parent', 'child']\n['parent', 'parent again']\n"


# ---------------------------------------------------------------------- AgentOps


async def test_agentops_is_recorded_and_contacts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    decorators = pytest.importorskip("agentops.sdk.decorators")
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: pytest.fail("a network was asked for"))

    with AgentOpsTracer().lifespan() as tracer:
        async with tracer.trace_context():
            decorators.operation(lambda: 1)()

    assert len(tracer.get_last_trace()) == 1


def test_agentops_may_be_missing(caplog: pytest.LogCaptureFixture) -> None:
    with AgentOpsTracer().lifespan() as tracer:
        assert (tracer.agentops_managed, tracer.instrument_managed, tracer.daemon) == (True, True, True)
        assert tracer.get_langchain_handler() is None or is_installed("agentops")


def test_every_span_of_the_process_is_seen_whoever_makes_the_tracer(tracer: OtelTracer) -> None:
    made_before = trace.get_tracer("made before the trace")
    with tracer._trace_context_sync():
        made_before.start_span("one").end()
    assert names(tracer) == ["one"]


# ---------------------------------------------------------------------- spans of OpenTelemetry's own methods


async def test_trace_begins_spans_as_a_tracer_of_opentelemetry_does(
    any_tracer: RecordingTracer, store: InMemoryLightningStore
) -> None:
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}

    async with any_tracer.trace_context(store=store, **ids) as recorder:
        with recorder.start_as_current_span("outer", attributes={"number": 1}) as outer:
            recorder.start_span("inner").end()
            outer.set_attribute("late", value=True)

    inner, around = await store.query_spans(rollout.rollout_id)
    assert (inner.name, inner.parent_id) == ("inner", around.span_id)
    assert (around.name, around.attributes) == ("outer", {"number": 1, "late": True})
    assert names(any_tracer) == ["inner", "outer"]


def test_span_begun_by_a_trace_records_what_is_raised_in_it(any_tracer: RecordingTracer) -> None:
    with any_tracer._trace_context_sync() as recorder:
        function = recorder.start_as_current_span("work")(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            function()

    (span,) = any_tracer.get_last_trace()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.events[0].name == "exception"


@pytest.mark.parametrize("kind", [OtelTracer, AgentOpsTracer])
def test_spans_begun_by_a_trace_nest_with_ours(kind: type[RecordingTracer]) -> None:
    with kind().lifespan() as tracer, tracer._trace_context_sync() as recorder:
        with recorder.start_as_current_span("outer"), tracer.operation_context("ours"):
            recorder.start_span("inner").end()

        spans = {span.name: span for span in recorder.spans()}
    parents = {name: span.parent.span_id if span.parent else None for name, span in spans.items()}
    assert parents["inner"] == spans["ours"].context.span_id
    assert parents["ours"] == spans["outer"].context.span_id
