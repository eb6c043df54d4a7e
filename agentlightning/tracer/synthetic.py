"""Spans made by hand, for tracers that do not write with OpenTelemetry."""

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from agentlightning.tracer.writing import nanoseconds
from agentlightning.types import Attributes, SpanCoreFields, StatusCode, TraceStatus
from agentlightning.utils.otel import format_exception_attributes, sanitize_attributes

__all__ = ["SyntheticRecording", "readable_span"]


def readable_span(core: SpanCoreFields, *, kind: type[ReadableSpan] = ReadableSpan) -> ReadableSpan:
    """A finished root span with fresh ids."""
    ids = RandomIdGenerator()
    return kind(
        name=core.name,
        context=trace.SpanContext(
            trace_id=ids.generate_trace_id(),
            span_id=ids.generate_span_id(),
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        ),
        resource=Resource.get_empty(),
        attributes=core.attributes,
        status=trace.Status(trace.StatusCode[core.status.status_code], core.status.description),
        start_time=nanoseconds(core.start_time),
        end_time=nanoseconds(core.end_time),
    )


class SyntheticRecording:
    """A span that is being written; a `SpanRecordingContext`."""

    def __init__(self, name: str, attributes: Mapping[str, Any], start_time: float) -> None:
        self._name = name
        self._attributes = sanitize_attributes(attributes)
        self._status = TraceStatus(status_code="UNSET")
        self._start_time = start_time
        self._end_time: float | None = None

    def record_exception(self, exception: BaseException) -> None:
        self._attributes |= format_exception_attributes(exception)
        self.record_status("ERROR", f"{type(exception).__name__}: {exception}")

    def record_attributes(self, attributes: Attributes) -> None:
        self._attributes |= sanitize_attributes(attributes)

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        self._status = TraceStatus(status_code=status_code, description=description)

    def end(self, at: float) -> None:
        self._end_time = at

    def get_recorded_span(self) -> SpanCoreFields:
        return SpanCoreFields(
            name=self._name,
            status=self._status,
            attributes=dict(self._attributes),
            start_time=self._start_time,
            end_time=self._end_time,
        )
