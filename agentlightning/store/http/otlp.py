"""OTLP ingest: the traces of any OpenTelemetry exporter become spans of attempts.

`read_traces` turns the body of an OTLP/HTTP request into spans, `ingest_traces` hands them to a store, `encode_answer`
writes the exporter's answer.

The attributes `agentlightning.rollout_id`, `agentlightning.attempt_id` and `agentlightning.span_sequence_id` of a span,
or else of its resource, tell its attempt. Spans that lack them, or that the store refuses, are rejected one by one with
a reason, as OTLP's partial success wants it; only a body that is not OTLP at all is an error.

A span becomes what `Span.from_opentelemetry` would have made of it. Its kind and its scope, for which spans have no
field, are kept beside: `kind` and `instrumentation_scope`. The trace state of a parent does not travel by OTLP.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson
from pydantic import ValidationError

from agentlightning.errors import (
    InvalidTransition,
    InvalidValue,
    NotFound,
    PayloadTooLarge,
    QuotaExceeded,
    SpansEvicted,
)
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.store.base import LightningStore
from agentlightning.store.http.otlp_messages import (
    JSON,
    KINDS,
    PROTOBUF,
    LinkMessage,
    ScopeSpansMessage,
    SpanMessage,
    TraceRequest,
    format_of,
    parse_body,
    quoted,
    reason_of,
    trace_service,
    whole_number,
)
from agentlightning.types import Event, Link, OtelResource, Span, SpanContext, TraceStatus
from agentlightning.types.attributes import AttributeValue

__all__ = ["JSON", "PROTOBUF", "RejectedSpans", "Traces", "encode_answer", "ingest_traces", "read_traces"]

_IS_REMOTE = 0x300
"""Bits of `flags`: it is known whether the parent (of a link: its span) is remote, and it is."""
_NANOSECONDS = 10**9
_LARGEST_SEQUENCE_ID = 2**53 - 1
"""What every reader of JSON holds exactly, and far below 64 bits: the store counts on from it."""
_LONGEST_MESSAGE = 1000
_SHOWN_REASONS = 3
_REFUSALS = (NotFound, InvalidValue, InvalidTransition, PayloadTooLarge, QuotaExceeded, SpansEvicted)
"""What a store says about spans it will never take, as opposed to a store that cannot take any now."""

_ROLLOUT_ID = LightningResourceAttributes.ROLLOUT_ID.value
_ATTEMPT_ID = LightningResourceAttributes.ATTEMPT_ID.value
_SEQUENCE_ID = LightningResourceAttributes.SPAN_SEQUENCE_ID.value


@dataclass(frozen=True)
class Traces:
    """What was read from one request."""

    spans: Sequence[Span]
    """In the order in which they began; a sequence id of 0 is still to be given."""
    reasons: Sequence[str]
    """Why a span was rejected, one reason for each that was."""


@dataclass(frozen=True)
class RejectedSpans:
    """Spans that were not taken and never will be."""

    count: int
    message: str
    """The first different reasons, short enough for an answer; empty if nothing was rejected."""


def read_traces(body: bytes, media_type: str) -> Traces:
    """The spans of an ExportTraceServiceRequest that is no longer compressed."""
    try:
        request = TraceRequest.model_validate(parse_body(body, media_type))
    except ValidationError as error:
        raise InvalidValue(reason_of(error)) from error
    begun: list[tuple[int, Span]] = []
    reasons: list[str] = []
    for resource_spans in request.resource_spans:
        resource = OtelResource(attributes=resource_spans.resource.attributes, schema_url=resource_spans.schema_url)
        for scope_spans in resource_spans.scope_spans:
            extra = _scope_field(scope_spans)
            for given in scope_spans.spans:
                try:
                    message = SpanMessage.model_validate(given)
                    begun.append((message.start_time_unix_nano, _converted(message, resource, extra)))
                except ValidationError as error:
                    reasons.append(f"Span of wrong shape: {reason_of(error)}")
                except InvalidValue as error:
                    reasons.append(f"Span {quoted(message.name)}: {error}")
    begun.sort(key=lambda entry: entry[0])
    return Traces([span for _, span in begun], reasons)


async def ingest_traces(store: LightningStore, traces: Traces) -> RejectedSpans:
    """Add the spans to a store; the same spans sent again change nothing.

    A store that cannot be reached raises `StoreUnavailable`, and the exporter may send everything again. Spans of a
    single attempt, whose quota they exceed, raise `QuotaExceeded`.
    """
    refused = await _add(store, traces.spans) if traces.spans else []
    reasons = [*traces.reasons, *refused]
    shown = list(dict.fromkeys(reasons))[:_SHOWN_REASONS]
    return RejectedSpans(len(reasons), " ".join(shown)[:_LONGEST_MESSAGE])


async def _add(store: LightningStore, spans: Sequence[Span]) -> list[str]:
    """Add the spans together or, if some are refused, attempt by attempt and then one by one; why some were refused."""
    try:
        await store.add_many_spans(spans)
    except _REFUSALS as error:
        by_owner: dict[tuple[str, str], list[Span]] = {}
        for span in spans:
            by_owner.setdefault((span.rollout_id, span.attempt_id), []).append(span)
        parts = list(by_owner.values())
        if len(parts) == 1 and isinstance(error, QuotaExceeded):
            raise
        if len(parts) == 1 and not isinstance(error, NotFound):  # the attempt is there, so some span is the trouble
            parts = [[span] for span in spans]
        if len(parts) == 1:
            return [str(error)] * len(spans)
        reasons: list[str] = []
        for part in parts:
            try:
                reasons += await _add(store, part)
            except QuotaExceeded as exceeded:
                reasons += [str(exceeded)] * len(part)
        return reasons
    return []


def encode_answer(media_type: str, rejected: int, message: str) -> bytes:
    """An ExportTraceServiceResponse in the format of the request; without rejected spans it is a full success."""
    if format_of(media_type) == JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": message}
        return orjson.dumps({"partialSuccess": partial} if rejected or message else {})
    answer = trace_service().ExportTraceServiceResponse()
    if rejected or message:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = message
    encoded: bytes = answer.SerializeToString()
    return encoded


# ---------------------------------------------------------------------- the conversion


def _scope_field(scope_spans: ScopeSpansMessage) -> dict[str, object]:
    """The scope as the extra field of its spans; nothing if it says nothing."""
    fields = {**scope_spans.scope.model_dump(), "schema_url": scope_spans.schema_url}
    kept = {key: value for key, value in fields.items() if value}
    return {"instrumentation_scope": kept} if kept else {}


def _converted(message: SpanMessage, resource: OtelResource, extra: Mapping[str, object]) -> Span:
    attributes = message.attributes
    owner = ChainMap(attributes, resource.attributes)
    trace_id = _required_id(message.trace_id, "trace_id", 32)
    span_id = _required_id(message.span_id, "span_id", 16)
    parent = None
    if message.parent_span_id:
        parent_id = _required_id(message.parent_span_id, "parent_span_id", 16)
        parent = _context(trace_id, parent_id, flags=message.flags)
    if message.kind != KINDS[0]:
        extra = {"kind": message.kind, **extra}
    try:
        sequence_id = whole_number(owner.get(_SEQUENCE_ID, 0), most=_LARGEST_SEQUENCE_ID)
    except InvalidValue as error:
        raise InvalidValue(f"{_SEQUENCE_ID} is {quoted(owner[_SEQUENCE_ID])}; {error}.") from error
    return Span(
        rollout_id=_owner_id(owner, _ROLLOUT_ID),
        attempt_id=_owner_id(owner, _ATTEMPT_ID),
        sequence_id=sequence_id,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent.span_id if parent else None,
        name=message.name,
        status=TraceStatus(status_code=message.status.code, description=message.status.message or None),
        attributes=attributes,
        events=[
            Event(name=event.name, attributes=event.attributes, timestamp=_seconds(event.time_unix_nano))
            for event in message.events
        ],
        links=[_link(link) for link in message.links],
        start_time=_seconds(message.start_time_unix_nano),
        end_time=_seconds(message.end_time_unix_nano),
        context=_context(trace_id, span_id, trace_state=message.trace_state),
        parent=parent,
        resource=resource,
        **extra,
    )


def _owner_id(attributes: Mapping[str, AttributeValue], key: str) -> str:
    value = attributes.get(key)
    if isinstance(value, str) and value:
        return value
    raise InvalidValue(
        f"{key} is {'missing' if value is None else quoted(value)}; "
        "set it as text on the span or on its resource, to say which attempt the span belongs to."
    )


def _required_id(identifier: str, name: str, digits: int) -> str:
    if len(identifier) == digits:
        return identifier
    what = f"is {quoted(identifier)}" if identifier else "is missing"
    raise InvalidValue(f"{name} {what}; give one of {digits} hexadecimal digits, not all of them zero.")


def _context(trace_id: str, span_id: str, *, flags: int = 0, trace_state: str = "") -> SpanContext:
    is_remote = flags & _IS_REMOTE == _IS_REMOTE
    members = (member.partition("=") for member in trace_state.split(",") if "=" in member)
    state = {key.strip(): value.strip() for key, _, value in members}
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=is_remote, trace_state=state)


def _link(link: LinkMessage) -> Link:
    trace_id = _required_id(link.trace_id or "0" * 32, "trace_id", 32)
    span_id = _required_id(link.span_id or "0" * 16, "span_id", 16)
    context = _context(trace_id, span_id, flags=link.flags, trace_state=link.trace_state)
    return Link(context=context, attributes=link.attributes or None)


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / _NANOSECONDS or None
