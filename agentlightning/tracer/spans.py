"""Spans that tracers write, with OpenTelemetry or by hand, and their conversion to the form that a store keeps."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from agentlightning.instrumentation.otel_internals import attributes_of, events_of, links_of
from agentlightning.store.copies import replaced
from agentlightning.types import Attributes, Span, SpanCoreFields, StatusCode, TraceStatus
from agentlightning.types.attributes import sum_of_numbers
from agentlightning.types.tracer import convert_timestamp
from agentlightning.utils.otel import sanitize_attributes, showable

_NANOSECONDS: Final = 10**9
_SCALARS = frozenset({str, bool, int, float})


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
    return unsampled_fields(name, attributes, timestamp)


def unsampled_fields(
    name: str, attributes: Mapping[str, Any] | None = None, timestamp: float | None = None
) -> SpanCoreFields:
    """A span that the provider's sampler left out, and so has nothing of its own."""
    at, status = time.time() if timestamp is None else timestamp, TraceStatus(status_code="UNSET")
    plain = sanitize_attributes(attributes or {})
    return SpanCoreFields(name=name, status=status, attributes=plain, start_time=at, end_time=at)


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
    recording = OtelRecording(span, name)
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield recording
    except Exception as error:
        recording.record_exception(error)
        raise
    finally:
        span.end(nanoseconds(end_time))


class OtelRecording:
    """A span of OpenTelemetry that is being written; a `SpanRecordingContext`."""

    def __init__(self, span: trace.Span, name: str) -> None:
        self.span = span
        self._name = name

    def record_exception(self, exception: BaseException) -> None:
        exception = showable(exception)
        self.span.record_exception(exception)
        self.span.set_status(trace.StatusCode.ERROR, f"{type(exception).__name__}: {exception}")

    def record_attributes(self, attributes: Attributes) -> None:
        self.span.set_attributes(sanitize_attributes(attributes))

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        self.span.set_status(trace.StatusCode[status_code], description)

    def get_recorded_span(self) -> SpanCoreFields:
        span = self.span
        return core_fields_of(span) if isinstance(span, ReadableSpan) else unsampled_fields(self._name)


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


# ---------------------------------------------------------------------- from OpenTelemetry's form to ours


class SpanConverter:
    """Gives what `Span.from_opentelemetry` gives; may be used by several threads.

    That looks at everything and validates it, which costs more than storing the span. Most spans differ only in their
    ids, times, name and attributes: no events, no links, no status, and the resource of their process. Those are made
    from the first one of their kind; the result is the same, at a fifth of the cost.
    """

    def __init__(self) -> None:
        self._patterns: dict[tuple[int, bool], tuple[Resource, Span]] = {}
        """By the id of their resource, which is kept with them, and whether there is a parent."""

    def convert(self, span: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        attributes = _plain_attributes(span) if _is_plain(span) else None
        key = (id(span.resource), span.parent is not None)
        known = self._patterns.get(key)
        if attributes is None or known is None:
            made = Span.from_opentelemetry(span, rollout_id, attempt_id, sequence_id)
            if attributes is not None:
                # A process has one resource, or few.
                if len(self._patterns) >= 64:
                    self._patterns.clear()
                self._patterns[key] = (span.resource, made)
            return made
        pattern, context, parent = known[1], span.get_span_context(), span.parent
        assert context is not None
        assert pattern.context is not None
        trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
        ours = replaced(pattern.context, trace_id=trace_id, span_id=span_id, trace_state={})
        parent_id = None if parent is None else trace.format_span_id(parent.span_id)
        return replaced(
            pattern,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=span.name,
            attributes=attributes,
            events=[],
            links=[],
            start_time=convert_timestamp(span.start_time),
            end_time=convert_timestamp(span.end_time),
            context=ours,
            parent=None if parent is None else replaced(ours, span_id=parent_id, trace_state={}),
        )


def _is_plain(span: ReadableSpan) -> bool:
    """Whether only ids, times, name and attributes are its own."""
    context, parent = span.get_span_context(), span.parent
    if type(span) is not ReadableSpan or context is None or context.is_remote or context.trace_state:
        return False
    if parent is not None and (parent.trace_id != context.trace_id or parent.is_remote or parent.trace_state):
        return False
    has_status = span.status.status_code is not trace.StatusCode.UNSET or span.status.description is not None
    return not (has_status or len(events_of(span)) or len(links_of(span)))


def _plain_attributes(span: ReadableSpan) -> dict[str, object] | None:
    """A copy in which sequences are lists; None if there is a value that needs a closer look."""
    attributes = dict(attributes_of(span))
    for name, value in attributes.items():
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is not tuple or not (all(type(item) is str for item in value) or sum_of_numbers(value) is not None):
            return None
        attributes[name] = list(value)
    return attributes
