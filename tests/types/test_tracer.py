"""Spans: what is read from OpenTelemetry, what is made by hand, and what travels."""

import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning.types import (
    Event,
    Link,
    OtelResource,
    Span,
    SpanAttributeNames,
    SpanContext,
    SpanCoreFields,
    SpanNames,
    TraceStatus,
)
from agentlightning.types.tracer import convert_timestamp, extract_extra_fields

SECOND = 1_700_000_000
NANOSECONDS = SECOND * 10**9

Record = Callable[[Callable[[otel.Tracer], None]], list[ReadableSpan]]


@pytest.fixture
def record() -> Record:
    """Run a function with a tracer of the SDK; the spans it finished, the innermost first."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=SdkResource({"service.name": "agent"}, "https://schema"), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def run(act: Callable[[otel.Tracer], None]) -> list[ReadableSpan]:
        act(provider.get_tracer("test"))
        return list(exporter.get_finished_spans())

    return run


def one_span(record: Record, **options: Any) -> ReadableSpan:
    (finished,) = record(lambda sdk: sdk.start_span("work", **options).end())
    return finished


def convert(source: ReadableSpan) -> Span:
    return Span.from_opentelemetry(source, rollout_id="ro-1", attempt_id="at-1", sequence_id=3)


# ---------------------------------------------------------------------- names and timestamps


def test_names_are_the_strings_of_the_protocol() -> None:
    assert {member.name: member for member in SpanNames} == {
        "REWARD": "agentlightning.reward",
        "MESSAGE": "agentlightning.message",
        "OBJECT": "agentlightning.object",
        "EXCEPTION": "agentlightning.exception",
        "VIRTUAL": "agentlightning.virtual",
        "ROLLOUT_ID": "agentlightning.rollout_id",
        "ATTEMPT_ID": "agentlightning.attempt_id",
        "SPAN_SEQUENCE_ID": "agentlightning.span_sequence_id",
    }
    assert {member.name: member for member in SpanAttributeNames} == {"MESSAGE": "message", "OBJECT": "object"}


@pytest.mark.parametrize(
    ("timestamp", "seconds"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(0, None, id="zero"),
        pytest.param(SECOND, SECOND, id="seconds"),
        pytest.param(1.5, 1.5, id="fraction"),
        pytest.param(10**12, 10**12, id="the-largest-second"),
        pytest.param(NANOSECONDS, SECOND, id="nanoseconds"),
        pytest.param(NANOSECONDS + 5 * 10**8, SECOND + 0.5, id="half-a-second"),
    ],
)
def test_timestamp_is_given_in_seconds(timestamp: float | None, seconds: float | None) -> None:
    assert convert_timestamp(timestamp) == seconds


# ---------------------------------------------------------------------- fields we do not model


class Source:
    """An object of a foreign library."""

    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)

    @property
    def known(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        pytest.param({"kind": "client"}, {"kind": "client"}, id="public"),
        pytest.param({"_kind": "client"}, {"kind": "client"}, id="underscore-is-stripped"),
        pytest.param({"name": 1, "_name": 2}, {}, id="excluded-with-and-without-underscore"),
        pytest.param({"_start": 1}, {}, id="excluded-by-its-private-name"),
        pytest.param({"_known": 1}, {}, id="attribute-of-the-class"),
        pytest.param({"kind": [PurePosixPath("a/b")]}, {"kind": ["a/b"]}, id="made-json-safe"),
        pytest.param({"kind": {"deep": [1, None]}}, {"kind": {"deep": [1, None]}}, id="nested"),
        pytest.param({}, {}, id="nothing"),
    ],
)
def test_fields_we_do_not_model_are_kept(fields: dict[str, object], kept: dict[str, object]) -> None:
    assert extract_extra_fields(Source(**fields), ["name", "_start"]) == kept


# ---------------------------------------------------------------------- from OpenTelemetry


def test_context_has_hexadecimal_ids_and_its_trace_state() -> None:
    source = otel.SpanContext(0xAB, 0xCD, is_remote=True, trace_state=otel.TraceState([("vendor", "x")]))
    assert SpanContext.from_opentelemetry(source) == SpanContext(
        trace_id="000000000000000000000000000000ab",
        span_id="00000000000000cd",
        is_remote=True,
        trace_state={"vendor": "x"},
    )


def test_span_is_converted_whole(record: Record) -> None:
    linked = otel.SpanContext(1, 2, is_remote=False)
    links = [otel.Link(linked, {"why": "retry"}), otel.Link(linked)]
    attributes: dict[str, Any] = {"text": "a", "flag": True, "n": 1, "score": 0.5}

    def act(sdk: otel.Tracer) -> None:
        span = sdk.start_span("work", attributes=attributes, links=links, start_time=NANOSECONDS)
        span.add_event("first", {"n": 1}, timestamp=NANOSECONDS)
        span.add_event("second", timestamp=NANOSECONDS + 10**9)
        span.set_status(otel.Status(otel.StatusCode.ERROR, "no answer"))
        span.end(NANOSECONDS + 5 * 10**8)

    (source,) = record(act)

    converted = convert(source)
    own, other = (SpanContext.from_opentelemetry(context) for context in (source.get_span_context(), linked))
    assert Span.model_validate(converted.model_dump(mode="json")) == converted
    assert converted == Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=3,
        name="work",
        trace_id=own.trace_id,
        span_id=own.span_id,
        parent_id=None,
        parent=None,
        context=own,
        attributes=attributes,
        start_time=SECOND,
        end_time=SECOND + 0.5,
        events=[
            Event(name="first", attributes={"n": 1}, timestamp=SECOND),
            Event(name="second", attributes={}, timestamp=SECOND + 1),
        ],
        links=[Link(context=other, attributes={"why": "retry"}), Link(context=other, attributes=None)],
        status=TraceStatus(status_code="ERROR", description="no answer"),
        resource=OtelResource(attributes={"service.name": "agent"}, schema_url="https://schema"),
    )


def test_child_span_names_its_parent(record: Record) -> None:
    def act(sdk: otel.Tracer) -> None:
        with sdk.start_as_current_span("outer"):
            sdk.start_span("inner").end()

    inner, outer = map(convert, record(act))

    assert (inner.parent_id, inner.trace_id) == (outer.span_id, outer.trace_id)
    assert inner.parent == outer.context


def test_span_without_context_gets_ids_of_zeros() -> None:
    span = convert(ReadableSpan("work"))

    assert (span.trace_id, span.span_id, span.context) == ("0" * 32, "0" * 16, None)
    assert (span.start_time, span.end_time) == (None, None)


def test_span_keeps_what_others_hung_on_it(record: Record) -> None:
    source = one_span(record)
    source.tenant = {"id": 7}  # type: ignore[attr-defined] # as instrumentation does

    assert convert(source).model_extra == {"tenant": {"id": 7}}


def test_mock_span_is_converted() -> None:
    mock = Mock(attributes={"a": 1}, events=[], links=[], start_time=NANOSECONDS, end_time=None)
    mock.name = "mocked"
    mock.parent = None
    mock.get_span_context.return_value = Mock(trace_id=1, span_id=2, is_remote=False, trace_state={})
    mock.status.status_code.name = "OK"
    mock.status.description = None
    mock.resource = Mock(attributes={}, schema_url="")

    span = convert(mock)

    assert (span.name, span.span_id, span.start_time) == ("mocked", "0000000000000002", SECOND)
    assert Span.model_validate_json(span.model_dump_json()) == span


# ---------------------------------------------------------------------- made by hand


def test_span_from_attributes_is_virtual_ok_and_nobodys() -> None:
    span = Span.from_attributes(attributes={"a": 1})

    assert (span.rollout_id, span.attempt_id, span.sequence_id) == ("", "", 0)
    assert (span.name, span.status.status_code, span.attributes) == ("agentlightning.virtual", "OK", {"a": 1})
    assert (span.events, span.links, span.parent, span.start_time, span.end_time) == ([], [], None, None, None)
    assert span.resource == OtelResource(attributes={}, schema_url="")


def test_span_from_attributes_keeps_what_it_is_given() -> None:
    given = {
        "rollout_id": "ro-1",
        "attempt_id": "at-1",
        "sequence_id": 7,
        "name": "work",
        "start_time": 1.0,
        "end_time": 2.0,
        "resource": OtelResource(attributes={"a": 1}, schema_url="u"),
        "status": TraceStatus(status_code="ERROR", description="broken"),
    }

    span = Span.from_attributes(attributes={}, **given)

    assert {name: getattr(span, name) for name in given} == given


def test_span_from_core_fields_takes_them_over() -> None:
    core = SpanCoreFields(
        name="work", status=TraceStatus(status_code="ERROR"), attributes={"a": 1}, start_time=1.0, end_time=2.0
    )

    span = Span.from_core_fields(core, rollout_id="ro-1", attempt_id="at-1", sequence_id=7)

    assert SpanCoreFields.model_validate(span.model_dump()) == core
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == ("ro-1", "at-1", 7)


def test_span_from_core_fields_starts_now_unless_they_say_otherwise() -> None:
    began = time.time()

    span = Span.from_core_fields(SpanCoreFields(name="work", status=TraceStatus(status_code="OK"), attributes={}))

    assert span.start_time is not None
    assert began <= span.start_time <= time.time()
    assert span.end_time is None


# ---------------------------------------------------------------------- on the wire


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.text() | st.booleans() | NUMBERS | st.lists(st.text()) | st.lists(st.booleans()) | st.lists(NUMBERS)


@given(attributes=st.dictionaries(st.text(), VALUES))
def test_span_survives_the_wire_whatever_its_attributes(attributes: dict[str, Any]) -> None:
    span = Span.from_attributes(attributes=attributes, rollout_id="ro-1", attempt_id="at-1", sequence_id=1)

    assert Span.model_validate_json(span.model_dump_json()) == span
    assert Span.model_validate(span.model_dump(mode="json")) == span


def test_values_the_sdk_knows_and_ours_do_not_become_text_or_go() -> None:
    attributes = {"none": None, "raw": b"\x00\x01", "nested": {"a": [1]}, "mixed": [1, "x"], "ids": (1, 2), "text": "t"}
    source = ReadableSpan(name="s", attributes=attributes)  # type: ignore[arg-type]

    span = Span.from_opentelemetry(source, "r", "a", 1)

    assert span.attributes == {
        "raw": "AAE=",
        "nested": '{"a": [1]}',
        "mixed": '[1, "x"]',
        "ids": [1, 2],
        "text": "t",
    }
