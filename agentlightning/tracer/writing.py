"""Writing spans with OpenTelemetry, and the view on them that knows nothing of it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.types import Attributes, SpanCoreFields, StatusCode, TraceStatus
from agentlightning.types.tracer import convert_timestamp
from agentlightning.utils.otel import sanitize_attributes

__all__ = ["OtelRecording", "core_fields_of", "nanoseconds", "operation", "write_span"]

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
    return _core_fields_or_nothing(span, name, attributes, timestamp)


def _core_fields_or_nothing(
    span: trace.Span, name: str, attributes: Mapping[str, Any] | None, timestamp: float | None
) -> SpanCoreFields:
    if isinstance(span, ReadableSpan):
        return core_fields_of(span)
    now = time.time() if timestamp is None else timestamp  # the provider's sampler left it out
    unset = TraceStatus(status_code="UNSET")
    sane = sanitize_attributes(attributes or {})
    return SpanCoreFields(name=name, status=unset, attributes=sane, start_time=now, end_time=now)


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
        return _core_fields_or_nothing(self.span, self._name, None, None)


@contextmanager
def operation(
    tracer: trace.Tracer,
    name: str,
    attributes: Mapping[str, Any] | None = None,
    *,
    start_time: float | None = None,
    end_time: float | None = None,
) -> Iterator[OtelRecording]:
    """A span around what happens inside; spans that begin there are its children."""
    span = tracer.start_span(name, attributes=dict(attributes or {}), start_time=nanoseconds(start_time))
    try:
        with trace.use_span(span, record_exception=True, set_status_on_exception=True):
            yield OtelRecording(span, name)
    finally:
        span.end(nanoseconds(end_time))
