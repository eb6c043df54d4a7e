"""Converting many spans from OpenTelemetry's form to ours, by example.

`Span.from_opentelemetry` looks at everything and validates it, which costs more than storing the span. Most spans
differ only in their ids, times, name and attributes: no events, no links, no status, and the resource of their
process. Those are made from the first one of their kind; the result is the same, at a fifth of the cost.
"""

from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.instrumentation.otel_internals import attributes_of, events_of, links_of
from agentlightning.store.values import replaced
from agentlightning.types import Span
from agentlightning.types.attributes import sum_of_numbers
from agentlightning.types.tracer import convert_timestamp

__all__ = ["SpanConverter"]

MOST_PATTERNS: Final = 64
"""A process has one resource, or few."""
_SCALARS = frozenset({str, bool, int, float})


class SpanConverter:
    """Gives what `Span.from_opentelemetry` gives; may be used by several threads."""

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
                if len(self._patterns) >= MOST_PATTERNS:
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


def _plain_attributes(span: ReadableSpan) -> dict[str, Any] | None:
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
