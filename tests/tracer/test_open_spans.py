"""Spans that stay open are shown to the store, once; those that end soon are not."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import Span as LiveSpan
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import StoreUnavailable
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer.binding import Binding, Recorder
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.trace_shipper import OpenSpans, TraceShipper
from agentlightning.types import Span

OTEL = TracerProvider(shutdown_on_exit=False).get_tracer("tests")
LINGER_SECONDS = 1.0


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


def begin(open_spans: OpenSpans, name: str) -> LiveSpan:
    span = OTEL.start_span(name)
    assert isinstance(span, LiveSpan)
    open_spans.begun[span.get_span_context().span_id] = Binding(DummyTracer(), Recorder(), None, "ro-1", "at-1"), span
    return span


async def look(open_spans: OpenSpans, store: ShownStore, *times: float) -> None:
    for time in times:
        await open_spans.look(store, time, LINGER_SECONDS)


async def test_a_span_that_is_open_at_two_looks_is_shown_once() -> None:
    open_spans, store = OpenSpans(), ShownStore()
    begin(open_spans, "long")

    await look(open_spans, store, 1.0, 2.0, 3.0, 4.0)

    assert store.shown == [["long"]]
    assert not open_spans.begun


async def test_a_span_that_ends_between_two_looks_is_not_shown() -> None:
    open_spans, store = OpenSpans(), ShownStore()
    span = begin(open_spans, "short")

    await look(open_spans, store, 1.0)
    span.end()
    await look(open_spans, store, 2.0)

    assert store.shown == []


async def test_looks_in_quick_succession_are_one_look() -> None:
    open_spans, store = OpenSpans(), ShownStore()
    begin(open_spans, "young")
    await look(open_spans, store, 1.0, 1.1, 1.2, 1.9)
    assert store.shown == []


async def test_a_store_that_could_not_be_reached_is_shown_the_next_ones() -> None:
    open_spans, store = OpenSpans(), ShownStore(StoreUnavailable("The store is down."))
    for number in range(2):
        begin(open_spans, f"step {number}")
        await look(open_spans, store, 10.0 * number, 10.0 * number + 1.0)

    assert store.shown == [["step 0"], ["step 1"]]


async def test_a_span_that_has_ended_is_let_go_before_any_look() -> None:
    store, span = ShownStore(), OTEL.start_span("short")
    assert isinstance(span, LiveSpan)
    shipper, rollout = TraceShipper(store), await store.start_rollout(input="a task")
    binding = Binding(DummyTracer(), Recorder(), shipper, rollout.rollout_id, rollout.attempt.attempt_id)

    shipper.begin(binding, span)
    span.end()
    shipper.put(binding, span)
    shipper.close()

    assert not shipper._open_spans.begun
    assert (store.shown, len(await store.query_spans(rollout.rollout_id))) == ([], 1)
