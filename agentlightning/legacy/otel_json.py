"""Traces of the v0.1 protocol: spans as `ReadableSpan.to_json` writes them, and the way back.

A trace comes from whatever the client used to record it, so reading is lenient: what is not a span is kept as an object
span, ids that are missing are derived from the content (the same entry gives the same span again), and attribute values
that OpenTelemetry does not allow are kept as JSON text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from agentlightning.types import (
    Attempt,
    Attributes,
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    SpanNames,
    TraceStatus,
)
from agentlightning.types.tracer import convert_timestamp

__all__ = ["entry_from_span", "made_span", "span_from_entry"]

Entry = Mapping[str, Any]

_HEX_PREFIX = "0x"
_TRACE_ID_DIGITS = 32
_SPAN_ID_DIGITS = 16


# ---------------------------------------------------------------------- reading


def span_from_entry(entry: Entry, attempt: Attempt, position: int) -> Span:
    """The span an entry of a trace describes, as a span of this attempt; its number is given later."""
    if not isinstance(entry.get("name"), str):
        text = json.dumps(entry, default=str)
        return made_span(SpanNames.OBJECT.value, {"object": text}, attempt, position, attempt.start_time)
    made = made_span(entry["name"], _attributes(entry.get("attributes")), attempt, position, attempt.start_time)
    context = _context(entry.get("context") or entry, made.trace_id, made.span_id)
    parent = entry.get("parent_id")
    parent_id = _hex_digits(parent, _SPAN_ID_DIGITS) if parent else None
    return made.model_copy(
        update={
            "trace_id": context.trace_id,
            "span_id": context.span_id,
            "parent_id": parent_id,
            "status": _status(entry.get("status")),
            "events": [_event(event) for event in _mappings(entry.get("events"))],
            "links": [_link(link) for link in _mappings(entry.get("links"))],
            "start_time": _seconds(entry.get("start_time")),
            "end_time": _seconds(entry.get("end_time")),
            "context": context,
            "parent": context.model_copy(update={"span_id": parent_id}) if parent_id else None,
            "resource": _resource(entry.get("resource")),
        }
    )


def made_span(name: str, attributes: Attributes, attempt: Attempt, position: int, moment: float) -> Span:
    """A span of no length that nobody recorded; the same content at the same position always has the same id."""
    content = json.dumps([attempt.rollout_id, attempt.attempt_id, position, name, attributes], sort_keys=True)
    digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
    trace = hashlib.sha256(f"{attempt.rollout_id}/{attempt.attempt_id}".encode()).hexdigest()
    return Span.from_attributes(
        name=name,
        attributes=attributes,
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        trace_id=trace[:_TRACE_ID_DIGITS],
        span_id=digest[:_SPAN_ID_DIGITS],
        start_time=moment,
        end_time=moment,
    )


def _mappings(value: object) -> list[Entry]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Sequence) else []


def _attributes(value: object) -> Attributes:
    given = value if isinstance(value, Mapping) else {}
    return {str(name): _attribute_value(item) for name, item in given.items() if item is not None}


def _attribute_value(value: Any) -> Any:
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, list) and (_all_are(value, str) or _all_are(value, (bool, int, float))):
        return value
    return json.dumps(value, default=str)


def _all_are(values: list[Any], kind: type | tuple[type, ...]) -> bool:
    return all(isinstance(item, kind) for item in values)


def _hex_digits(value: object, digits: int) -> str:
    """An id without its `0x`, at full length."""
    text = format(value, "x") if isinstance(value, int) else str(value)
    return text.removeprefix(_HEX_PREFIX).zfill(digits)


def _context(given: Entry, trace_id: str, span_id: str) -> SpanContext:
    state = given.get("trace_state")
    return SpanContext(
        trace_id=_hex_digits(given.get("trace_id") or trace_id, _TRACE_ID_DIGITS),
        span_id=_hex_digits(given.get("span_id") or span_id, _SPAN_ID_DIGITS),
        is_remote=bool(given.get("is_remote", False)),
        trace_state={str(key): str(item) for key, item in state.items()} if isinstance(state, Mapping) else {},
    )


def _status(value: object) -> TraceStatus:
    given = value if isinstance(value, Mapping) else {}
    description = given.get("description")
    return TraceStatus(
        status_code=str(given.get("status_code") or "UNSET"),
        description=None if description is None else str(description),
    )


def _event(given: Entry) -> Event:
    return Event(
        name=str(given.get("name", "")),
        attributes=_attributes(given.get("attributes")),
        timestamp=_seconds(given.get("timestamp")),
    )


def _link(given: Entry) -> Link:
    context = given.get("context")
    return Link(
        context=_context(context if isinstance(context, Mapping) else {}, "0", "0"),
        attributes=_attributes(given.get("attributes")) or None,
    )


def _resource(value: object) -> OtelResource:
    given = value if isinstance(value, Mapping) else {}
    return OtelResource(attributes=_attributes(given.get("attributes")), schema_url=str(given.get("schema_url") or ""))


def _seconds(value: object) -> float | None:
    """Seconds since the epoch from ISO text, seconds or nanoseconds; None for anything else."""
    if isinstance(value, (int, float)):
        return convert_timestamp(value)
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


# ---------------------------------------------------------------------- writing


def entry_from_span(span: Span) -> dict[str, Any]:
    """A stored span in the shape of `ReadableSpan.to_json`."""
    return {
        "name": span.name,
        "context": _context_entry(span.trace_id, span.span_id),
        "kind": "SpanKind.INTERNAL",
        "parent_id": _HEX_PREFIX + span.parent_id if span.parent_id else None,
        "start_time": _iso(span.start_time),
        "end_time": _iso(span.end_time),
        "status": span.status.model_dump(mode="json", exclude_none=True),
        "attributes": dict(span.attributes),
        "events": [
            {"name": event.name, "timestamp": _iso(event.timestamp), "attributes": dict(event.attributes)}
            for event in span.events
        ],
        "links": [
            {
                "context": _context_entry(link.context.trace_id, link.context.span_id),
                "attributes": dict(link.attributes or {}),
            }
            for link in span.links
        ],
        "resource": span.resource.model_dump(mode="json"),
    }


def _context_entry(trace_id: str, span_id: str) -> dict[str, str]:
    return {"trace_id": _HEX_PREFIX + trace_id, "span_id": _HEX_PREFIX + span_id, "trace_state": "[]"}


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
