"""Converting many spans from OpenTelemetry's form to ours, by example.

`Span.from_opentelemetry` looks at everything and validates it, which costs more than storing the span. Most spans
differ only in their ids, times, name and attributes: no events, no links, no status, and the resource of their
process. Those are made from the first one of their kind; the result is the same, at a fifth of the cost.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.store.values import replaced
from agentlightning.types import Span
from agentlightning.types.attributes import sum_of_numbers
from agentlightning.types.tracer import convert_timestamp

__all__ = ["SpanConverter", "attributes_behind", "events_behind"]

MOST_PATTERNS: Final = 64
"""A process has one resource, or few."""
_SCALARS = frozenset({str, bool, int, float})


def attributes_behind(span: ReadableSpan) -> Mapping[str, Any]:
    """The attributes, straight from the SDK's dictionary where there is one: its own view is ten times slower."""
    behind: Mapping[str, Any] | None = getattr(getattr(span, "_attributes", None), "_dict", None)
    return behind if behind is not None else (span.attributes or {})


def events_behind(span: ReadableSpan) -> Sequence[Any]:
    """The events, not to be changed: the SDK's own view is a copy, and most spans have none."""
    behind: Sequence[Any] | None = getattr(span, "_events", None)
    return behind if behind is not None else span.events


def _has_links(span: ReadableSpan) -> bool:
    behind: Sequence[Any] | None = getattr(span, "_links", None)
    return len(behind if behind is not None else span.links) > 0


class SpanConverter:
    """Gives what `Span.from_opentelemetry` gives; may be used by several threads."""

    def __init__(self) -> None:
        self._patterns: dict[tuple[int, bool], tuple[Resource, Span]] = {}
        """By the id of their resource, which is kept with them, and whether there is a parent."""

    def convert(self, span: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        attributes = _plain_attributes(span) if _is_plain(span) else None
        if attributes is None:
            return Span.from_opentelemetry(span, rollout_id, attempt_id, sequence_id)
        key = (id(span.resource), span.parent is not None)
        known = self._patterns.get(key)
        if known is not None:
            return _by_example(known[1], span, attributes, (rollout_id, attempt_id, sequence_id))
        made = Span.from_opentelemetry(span, rollout_id, attempt_id, sequence_id)
        if len(self._patterns) >= MOST_PATTERNS:
            self._patterns.clear()
        self._patterns[key] = (span.resource, made)
        return made


def _by_example(pattern: Span, span: ReadableSpan, attributes: dict[str, Any], place: tuple[str, str, int]) -> Span:
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    assert pattern.context is not None
    trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    ours = replaced(pattern.context, trace_id=trace_id, span_id=span_id, trace_state={})
    parent_id = None if parent is None else trace.format_span_id(parent.span_id)
    parents = None if parent is None else replaced(ours, span_id=parent_id, trace_state={})
    return replaced(
        pattern,
        rollout_id=place[0],
        attempt_id=place[1],
        sequence_id=place[2],
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
        parent=parents,
    )


def _is_plain(span: ReadableSpan) -> bool:
    """Whether only ids, times, name and attributes are its own."""
    context, parent = span.get_span_context(), span.parent
    return (
        type(span) is ReadableSpan
        and context is not None
        and not (context.is_remote or context.trace_state or len(events_behind(span)) or _has_links(span))
        and (
            parent is None or (parent.trace_id == context.trace_id and not parent.is_remote and not parent.trace_state)
        )
        and span.status.status_code is trace.StatusCode.UNSET
        and span.status.description is None
    )


def _plain_attributes(span: ReadableSpan) -> dict[str, Any] | None:
    """A copy in which sequences are lists; None if there is a value that needs a closer look."""
    attributes = dict(attributes_behind(span))
    for name, value in attributes.items():
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is not tuple or not _is_uniform(value):
            return None
        attributes[name] = list(value)
    return attributes


def _is_uniform(values: Sequence[Any]) -> bool:
    return all(type(value) is str for value in values) or sum_of_numbers(values) is not None
