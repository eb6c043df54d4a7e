"""Conversion by example gives what the long way gives."""

from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from agentlightning.tracer.spans import SpanConverter
from agentlightning.types import Span


class Collected(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


REMOTE = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED))


def plain(tracer: trace.Tracer) -> None:
    tracer.start_span("plain", attributes={"text": "x", "number": 1, "yes": True, "share": 0.5}).end()


def sequences(tracer: trace.Tracer) -> None:
    tracer.start_span("lists", attributes={"ids": [1, 2], "words": ["a"], "none": [], "mixed": [1, 2.5]}).end()


def nested(tracer: trace.Tracer) -> None:
    with tracer.start_as_current_span("parent"):
        tracer.start_span("child", attributes={"a": 1}).end()
        tracer.start_span("another child").end()


def failing(tracer: trace.Tracer) -> None:
    span = tracer.start_span("failing")
    span.record_exception(ValueError("no"))
    span.set_status(trace.StatusCode.ERROR, "no")
    span.end()


def linked(tracer: trace.Tracer) -> None:
    tracer.start_span("linked", links=[trace.Link(REMOTE, {"a": 1})]).end()


def remote(tracer: trace.Tracer) -> None:
    parent = trace.set_span_in_context(trace.NonRecordingSpan(REMOTE))
    tracer.start_span("remote", context=parent).end()


def odd(tracer: trace.Tracer) -> None:
    tracer.start_span("odd", attributes={"bytes": b"\xff", "text": "x"}).end()


@pytest.mark.parametrize("write", [plain, sequences, nested, failing, linked, remote, odd])
def test_both_ways_agree(write: Callable[[trace.Tracer], None]) -> None:
    collected = Collected()
    for name in ("one", "two"):
        provider = TracerProvider(resource=Resource({"service.name": name}), shutdown_on_exit=False)
        provider.add_span_processor(collected)
        for _ in range(2):
            plain(provider.get_tracer("tests"))
            write(provider.get_tracer("tests"))
    converter = SpanConverter()

    for number, span in enumerate(collected.spans):
        expected = Span.from_opentelemetry(span, "ro-1", "at-1", number)
        made = converter.convert(span, "ro-1", "at-1", number)
        assert made == expected
        assert made.model_dump_json() == expected.model_dump_json()


def test_converted_spans_share_nothing_that_changes() -> None:
    collected = Collected()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(collected)
    for _ in range(3):
        plain(provider.get_tracer("tests"))
    converter = SpanConverter()

    _, second, third = (converter.convert(span, "ro-1", "at-1", 1) for span in collected.spans)
    second.attributes["text"] = "changed"
    second.events.append(None)  # type: ignore[arg-type] # anything will do

    assert third.attributes["text"] == "x"
    assert third.events == []
