"""Spans that tracers write: with OpenTelemetry, or by hand; and the view of them that knows nothing of it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from agentlightning.types import Attributes, SpanCoreFields, StatusCode, TraceStatus
from agentlightning.types.tracer import convert_timestamp
from agentlightning.utils.otel import format_exception_attributes, sanitize_attributes

__all__ = [
    "OtelRecording",
    "SyntheticRecording",
    "core_fields_of",
    "nanoseconds",
    "operation",
    "readable_span",
    "write_span",
]

_NANOSECONDS: Final = 10**9


def nanoseconds(seconds: float | None) -> int | None:
    """A time as OpenTelemetry counts it."""
    return None if seconds is None else int(seconds * _NANOSECONDS)


def core_fields_of(span: ReadableSpan) -> SpanCoreFields:
    """A span without ids and relations."""
    return SpanCoreFields(
        name=span.name,
        status=TraceStatus.from_opentelemetry(span.status),
        attributes=sanitize_attributes(span.attributes or {}),
        start_time=convert_timestamp(span.start_time),
        end_time=convert_timestamp(span.end_time),
    )


# ---------------------------------------------------------------------- with OpenTelemetry


def write_span(
    tracer: trace.Tracer,
    name: str,
    attributes: Mapping[str, Any] | None,
    *,
    timestamp: float | None = None,
    status: TraceStatus | None = None,
) -> SpanCoreFields:
    """A span that begins and ends at once."""
    at = nanoseconds(timestamp)
    span = tracer.start_span(name, attributes=dict(attributes or {}), start_time=at)
    if status is not None:
        span.set_status(trace.StatusCode[status.status_code], status.description)
    span.end(at)
    if isinstance(span, ReadableSpan):
        return core_fields_of(span)
    return SyntheticRecording(name, attributes or {}, timestamp).end(timestamp)  # the provider's sampler left it out


@contextmanager
def operation(
    tracer: trace.Tracer,
    name: str,
    attributes: Mapping[str, Any] | None = None,
    *,
    start_time: float | None = None,
    end_time: float | None = None,
) -> "Iterator[OtelRecording]":
    """A span around what happens inside; spans that begin there are its children."""
    span = tracer.start_span(name, attributes=dict(attributes or {}), start_time=nanoseconds(start_time))
    try:
        with trace.use_span(span, record_exception=True, set_status_on_exception=True):
            yield OtelRecording(span, name)
    finally:
        span.end(nanoseconds(end_time))


class OtelRecording:
    """A span of OpenTelemetry that is being written; a `SpanRecordingContext`."""

    def __init__(self, span: trace.Span, name: str) -> None:
        self.span = span
        self._name = name

    def record_exception(self, exception: BaseException) -> None:
        self.span.record_exception(exception)
        self.span.set_status(trace.StatusCode.ERROR, f"{type(exception).__name__}: {exception}")

    def record_attributes(self, attributes: Attributes) -> None:
        self.span.set_attributes(sanitize_attributes(attributes))

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        self.span.set_status(trace.StatusCode[status_code], description)

    def get_recorded_span(self) -> SpanCoreFields:
        if isinstance(self.span, ReadableSpan):
            return core_fields_of(self.span)
        return SyntheticRecording(self._name, {}).end()


# ---------------------------------------------------------------------- by hand


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
    """A span that is being written without OpenTelemetry; a `SpanRecordingContext`."""

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, Any],
        start_time: float | None = None,
        status: TraceStatus | None = None,
    ) -> None:
        self._span = SpanCoreFields(
            name=name,
            status=status or TraceStatus(status_code="UNSET"),
            attributes=sanitize_attributes(attributes),
            start_time=time.time() if start_time is None else start_time,
            end_time=None,
        )

    def record_exception(self, exception: BaseException) -> None:
        self._span.attributes |= format_exception_attributes(exception)
        self.record_status("ERROR", f"{type(exception).__name__}: {exception}")

    def record_attributes(self, attributes: Attributes) -> None:
        self._span.attributes |= sanitize_attributes(attributes)

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        self._span.status = TraceStatus(status_code=status_code, description=description)

    def end(self, end_time: float | None = None) -> SpanCoreFields:
        """The span, which has ended then, or now."""
        self._span.end_time = time.time() if end_time is None else end_time
        return self.get_recorded_span()

    def get_recorded_span(self) -> SpanCoreFields:
        return self._span.model_copy(update={"attributes": dict(self._span.attributes)})
