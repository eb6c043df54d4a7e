"""OTLP ingest: the traces of any OpenTelemetry exporter become spans of attempts.

`read_traces` turns the body of an OTLP/HTTP request into spans, `ingest_traces` hands them to a store, `encode_answer`
writes the exporter's answer. Nothing here knows a server: decompression, status codes and permissions are its business.
How the two formats look is written in `otlp_formats`, as is what becomes of values that our attributes cannot hold.

Whose a span is, it says itself in the attributes `agentlightning.rollout_id`, `agentlightning.attempt_id` and
`agentlightning.span_sequence_id`, or its resource does; the span wins. Spans that do not say so, or that the store
refuses, are rejected one by one with a reason, as OTLP's partial success wants it; only a body that is not OTLP at all
is an error.

A span becomes what `Span.from_opentelemetry` would have made of it. Its kind and its scope, for which spans have no
field, are kept beside: `kind` and `instrumentation_scope`. The trace state of a parent does not travel by OTLP.
"""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentlightning.errors import InvalidTransition, InvalidValue, NotFound, PayloadTooLarge, SpansEvicted
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.store.base import LightningStore
from agentlightning.store.http.otlp_formats import (
    JSON,
    PROTOBUF,
    Message,
    essence,
    quoted,
    read_message,
    trace_service,
    whole_number,
)
from agentlightning.types import Event, Link, OtelResource, Span, SpanContext, TraceStatus
from agentlightning.types.attributes import AttributeValue

__all__ = ["JSON", "PROTOBUF", "Rejected", "Traces", "encode_answer", "ingest_traces", "read_traces"]

_STATUS_CODES = ("UNSET", "OK", "ERROR")
_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_IS_REMOTE = 0x300
"""Bits of `flags`: it is known whether the parent (of a link: its span) is remote, and it is."""
_NANOSECONDS = 10**9
_TRACE_ID_DIGITS = 32
_SPAN_ID_DIGITS = 16
_LARGEST_SEQUENCE_ID = 2**53 - 1
"""What every reader of JSON holds exactly, and far below 64 bits: the store counts on from it."""
_LONGEST_MESSAGE = 1000
_SHOWN_REASONS = 3
_REFUSALS = (NotFound, InvalidTransition, InvalidValue, PayloadTooLarge, SpansEvicted)
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

    @property
    def owners(self) -> set[tuple[str, str]]:
        """The (rollout id, attempt id) the spans belong to."""
        return {(span.rollout_id, span.attempt_id) for span in self.spans}


@dataclass(frozen=True)
class Rejected:
    """Spans that were not taken and never will be."""

    count: int
    messages: tuple[str, ...]
    """The first different reasons."""

    @property
    def message(self) -> str:
        """All messages as one text, short enough for an answer; empty if nothing was rejected."""
        return " ".join(self.messages)[:_LONGEST_MESSAGE]


# ---------------------------------------------------------------------- from bytes to spans and back


def read_traces(body: bytes, media_type: str) -> Traces:
    """The spans of an ExportTraceServiceRequest that is no longer compressed."""
    return _converted(read_message(body, media_type))


async def ingest_traces(store: LightningStore, traces: Traces) -> Rejected:
    """Add the spans to a store; the same spans sent again change nothing.

    A store that cannot be reached raises `StoreUnavailable`, and the exporter may send everything again.
    """
    refused = await _add(store, traces.spans) if traces.spans else []
    reasons = [*traces.reasons, *refused]
    return Rejected(len(reasons), tuple(dict.fromkeys(reasons))[:_SHOWN_REASONS])


def encode_answer(media_type: str, rejected: int, message: str) -> bytes:
    """An ExportTraceServiceResponse in the format of the request; without rejected spans it is a full success."""
    if essence(media_type) == JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": message}
        return orjson.dumps({"partialSuccess": partial} if rejected or message else {})
    answer = trace_service().ExportTraceServiceResponse()
    if rejected or message:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = message
    encoded: bytes = answer.SerializeToString()
    return encoded


# ---------------------------------------------------------------------- adding


async def _add(store: LightningStore, spans: Sequence[Span]) -> list[str]:
    """Add the spans together or, if some of them are refused, in ever smaller parts; the reasons for those refused."""
    try:
        await store.add_many_spans(spans)
    except _REFUSALS as error:
        parts = _parts(spans, by_owner_only=isinstance(error, NotFound))
        if len(parts) == 1:
            return [str(error)] * len(spans)
        return [reason for part in parts for reason in await _add(store, part)]
    return []


def _parts(spans: Sequence[Span], *, by_owner_only: bool) -> list[list[Span]]:
    """The spans of each attempt; those of a single attempt one by one, unless the attempt itself is the trouble."""
    by_owner: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        by_owner.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    if len(by_owner) > 1 or by_owner_only:
        return list(by_owner.values())
    return [[span] for span in spans]


# ---------------------------------------------------------------------- the conversion


@dataclass(frozen=True)
class _Origin:
    """What spans share that come from one place."""

    resource: OtelResource
    extra: Mapping[str, Any]
    """The field that holds the instrumentation scope, or nothing."""


def _converted(request: Message) -> Traces:
    begun: list[tuple[int, Span]] = []
    reasons: list[str] = []
    for message, origin in _messages(request):
        name = ""
        try:
            name = message.text("name")
            begun.append((message.number("start_time_unix_nano"), _span(message, origin)))
        except InvalidValue as error:
            reasons.append(f"Span {quoted(name)}: {error}")
    begun.sort(key=lambda entry: entry[0])
    return Traces([span for _, span in begun], reasons)


def _messages(request: Message) -> Iterator[tuple[Message, _Origin]]:
    for resource_spans in request.parts("resource_spans"):
        attributes = resource_spans.part("resource").attributes()
        resource = OtelResource(attributes=attributes, schema_url=resource_spans.text("schema_url"))
        for scope_spans in resource_spans.parts("scope_spans"):
            origin = _Origin(resource, _scope(scope_spans))
            for message in scope_spans.parts("spans"):
                yield message, origin


def _span(message: Message, origin: _Origin) -> Span:
    attributes, status = message.attributes(), message.part("status")
    said = ChainMap(attributes, origin.resource.attributes)
    trace_id = _own_identifier(message, "trace_id", digits=_TRACE_ID_DIGITS)
    span_id = _own_identifier(message, "span_id", digits=_SPAN_ID_DIGITS)
    parent_id = _identifier(message, "parent_span_id", digits=_SPAN_ID_DIGITS)
    parent = _context(trace_id, parent_id, flags=message.number("flags")) if parent_id.strip("0") else None
    kind = message.choice("kind", _KINDS)
    extra = origin.extra if kind == _KINDS[0] else {"kind": kind, **origin.extra}
    return Span(
        rollout_id=_owner(said, _ROLLOUT_ID),
        attempt_id=_owner(said, _ATTEMPT_ID),
        sequence_id=whole_number(said.get(_SEQUENCE_ID, 0), _SEQUENCE_ID, least=0, most=_LARGEST_SEQUENCE_ID),
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent.span_id if parent else None,
        name=message.text("name"),
        status=TraceStatus(
            status_code=status.choice("code", _STATUS_CODES), description=status.text("message") or None
        ),
        attributes=attributes,
        events=[_event(event) for event in message.parts("events")],
        links=[_link(link) for link in message.parts("links")],
        start_time=_seconds(message, "start_time_unix_nano"),
        end_time=_seconds(message, "end_time_unix_nano"),
        context=_context(trace_id, span_id, trace_state=message.text("trace_state")),
        parent=parent,
        resource=origin.resource,
        **extra,
    )


def _owner(said: Mapping[str, AttributeValue], key: str) -> str:
    value = said.get(key)
    if isinstance(value, str) and value:
        return value
    raise InvalidValue(
        f"{key} is {'missing' if value is None else quoted(value)}; "
        "set it as text on the span or on its resource, to say which attempt the span belongs to."
    )


def _own_identifier(message: Message, name: str, *, digits: int) -> str:
    identifier = _identifier(message, name, digits=digits)
    if not identifier.strip("0"):
        raise InvalidValue(f"{name} is missing; give one of {digits} hexadecimal digits, not all of them zero.")
    return identifier


def _identifier(message: Message, name: str, *, digits: int) -> str:
    """An id of that many hexadecimal digits; zeros if there is none."""
    identifier = message.identifier(name) or "0" * digits
    if len(identifier) != digits or not _is_hexadecimal(identifier):
        raise InvalidValue(f"{name} is {quoted(identifier)}; give one of {digits} hexadecimal digits.")
    return identifier


_is_hexadecimal = re.compile("[0-9a-f]*").fullmatch


def _context(trace_id: str, span_id: str, *, flags: int = 0, trace_state: str = "") -> SpanContext:
    is_remote = flags & _IS_REMOTE == _IS_REMOTE
    members = (member.partition("=") for member in trace_state.split(",") if "=" in member)
    state = {key.strip(): value.strip() for key, _, value in members}
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=is_remote, trace_state=state)


def _event(message: Message) -> Event:
    return Event(
        name=message.text("name"), attributes=message.attributes(), timestamp=_seconds(message, "time_unix_nano")
    )


def _link(message: Message) -> Link:
    trace_id = _identifier(message, "trace_id", digits=_TRACE_ID_DIGITS)
    span_id = _identifier(message, "span_id", digits=_SPAN_ID_DIGITS)
    context = _context(trace_id, span_id, flags=message.number("flags"), trace_state=message.text("trace_state"))
    return Link(context=context, attributes=message.attributes() or None)


def _scope(scope_spans: Message) -> dict[str, object]:
    """The scope as the extra field of its spans; nothing if it says nothing."""
    scope = scope_spans.part("scope")
    said = {
        "name": scope.text("name"),
        "version": scope.text("version"),
        "schema_url": scope_spans.text("schema_url"),
        "attributes": scope.attributes(),
    }
    said = {key: value for key, value in said.items() if value}
    return {"instrumentation_scope": said} if said else {}


def _seconds(message: Message, name: str) -> float | None:
    return message.number(name) / _NANOSECONDS or None
