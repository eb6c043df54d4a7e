"""Spans that stay open are shown to the store, once; those that end soon are not."""

from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry.sdk.trace import Span as LiveSpan
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import StoreUnavailable
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.tracer.binding import Binding, Recorder
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.trace_shipper import NANOSECONDS, SHOWN_SECONDS, TraceShipper
from agentlightning.types import Span
from tests.runner.working import until

OTEL = TracerProvider(shutdown_on_exit=False).get_tracer("tests")
SHOWN_NS = int(SHOWN_SECONDS * NANOSECONDS)


class ShownStore(InMemoryLightningStore):
    """Keeps what it was shown, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.shown: list[list[str]] = []

    async def add_open_spans(self, spans: Sequence[Span]) -> None:
        self.shown.append([span.name for span in spans])
        if self.error is not None:
            raise self.error


class Trace:
    """One trace on its way to a store."""

    def __init__(self, store: ShownStore) -> None:
        self.shipper = TraceShipper(store)
        self.binding = Binding(DummyTracer(), Recorder(), self.shipper, "ro-1", "at-1")
        self.shipper.open(self.binding)

    def begin(self, name: str) -> LiveSpan:
        span = OTEL.start_span(name)
        assert isinstance(span, LiveSpan)
        self.binding.recorder.open_spans[span.get_span_context().span_id] = span
        return span

    async def look(self, span: LiveSpan, *, after_ns: int) -> None:
        """Show what is open so long after the span began."""
        assert span.start_time is not None
        await self.shipper.show_open_spans(span.start_time + after_ns)


@pytest.fixture
async def opened() -> AsyncIterator[Trace]:
    trace = Trace(ShownStore())
    yield trace
    trace.shipper.close()


def shown(trace: Trace) -> list[list[str]]:
    store = trace.shipper.store
    assert isinstance(store, ShownStore)
    return store.shown


async def test_a_span_that_is_open_for_a_second_is_shown_once(opened: Trace) -> None:
    span = opened.begin("long")

    for seconds in (1, 2, 3):
        await opened.look(span, after_ns=seconds * SHOWN_NS)

    assert shown(opened) == [["long"]]


async def test_a_span_that_ends_or_is_young_is_not_shown(opened: Trace) -> None:
    short, young = opened.begin("short"), opened.begin("young")
    short.end()
    opened.binding.recorder.record(short)

    await opened.look(young, after_ns=SHOWN_NS - 1)

    assert shown(opened) == []
    assert list(opened.binding.recorder.open_spans.values()) == [young]


async def test_spans_of_a_trace_that_has_ended_are_not_shown(opened: Trace) -> None:
    span = opened.begin("left open")
    await opened.shipper.flush(opened.binding)

    await opened.look(span, after_ns=SHOWN_NS)

    assert shown(opened) == []


async def test_a_store_that_could_not_be_reached_is_shown_the_next_ones(opened: Trace) -> None:
    opened.shipper.store.error = StoreUnavailable("The store is down.")  # type: ignore[attr-defined]
    for number in range(2):
        await opened.look(opened.begin(f"step {number}"), after_ns=SHOWN_NS)

    assert shown(opened) == [["step 0"], ["step 1"]]


async def test_what_an_agent_does_is_shown_while_it_does_it() -> None:
    store, tracer = ShownStore(), OtelTracer()
    rollout = await store.start_rollout("task")

    with tracer.lifespan(store):
        async with tracer.trace_context(
            store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
        ) as recorder:
            with recorder.start_as_current_span("long"):
                await until(lambda: store.shown)

    assert store.shown == [["long"]]
