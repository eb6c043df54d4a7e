"""Spans: OpenTelemetry's records as plain data, with the rollout and attempt they belong to."""

import base64
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, Union

from pydantic import BaseModel, ConfigDict

from agentlightning.semconv import AGL_EXCEPTION, AGL_MESSAGE, AGL_OBJECT, AGL_REWARD, AGL_VIRTUAL
from agentlightning.types.attributes import Attributes, AttributeValue

if TYPE_CHECKING:  # the SDK is a third of this package's import time, and data needs none of it
    from opentelemetry import trace as otel
    from opentelemetry.sdk.resources import Resource as SdkResource
    from opentelemetry.sdk.trace import Event as SdkEvent
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = [
    "AttributeValue",
    "Attributes",
    "TraceState",
    "SpanContext",
    "StatusCode",
    "TraceStatus",
    "Event",
    "Link",
    "OtelResource",
    "Span",
    "SpanCoreFields",
    "SpanRecordingContext",
    "SpanNames",
    "SpanAttributeNames",
    "SpanLike",
]

TraceState: TypeAlias = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]

_NANOSECONDS = 10**9
_TRACE_ID_BYTES = 16
_SPAN_ID_BYTES = 8


class SpanNames(str, Enum):
    """Names of the spans we write, and of the attributes that say whose they are."""

    REWARD = AGL_REWARD
    MESSAGE = AGL_MESSAGE
    OBJECT = AGL_OBJECT
    EXCEPTION = AGL_EXCEPTION
    VIRTUAL = AGL_VIRTUAL
    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"


class SpanAttributeNames(str, Enum):
    """Attribute keys of message and object spans."""

    MESSAGE = "message"
    OBJECT = "object"


def convert_timestamp(timestamp: int | float | None) -> float | None:
    """Seconds, whether given in seconds or nanoseconds; None for zero and None."""
    if not timestamp:
        return None
    # A timestamp above this is in nanoseconds: in seconds it would lie thirty thousand years ahead.
    return timestamp / _NANOSECONDS if timestamp > 1e12 else timestamp


def extract_extra_fields(src: object, excluded_fields: Iterable[str]) -> dict[str, Any]:
    """What an OpenTelemetry object holds beyond the fields we model, made JSON-safe."""
    excluded = {name.lstrip("_") for name in excluded_fields}
    of_class = set(dir(type(src)))
    extra = {name.lstrip("_"): value for name, value in vars(src).items()}
    kept = {name: value for name, value in extra.items() if name and name not in excluded and name not in of_class}
    safe: dict[str, object] = json.loads(json.dumps(kept, default=str)) if kept else {}
    return safe


def _attributes(attributes: Mapping[str, Any] | None) -> dict[str, AttributeValue]:
    """An SDK's attributes as ours; of the values ours do not know, empty ones go and others become text."""
    kept = dict(attributes or {})
    for name, value in (attributes or {}).items():
        if value is None:
            del kept[name]
        elif isinstance(value, bytes):
            kept[name] = base64.b64encode(value).decode()
        elif isinstance(value, Mapping) or (isinstance(value, Sequence) and not _is_flat(value)):
            kept[name] = json.dumps(value, default=str)
    return kept


def _is_flat(values: Sequence[object]) -> bool:
    """Whether a sequence holds texts only, or numbers only."""
    return isinstance(values, str) or any(all(isinstance(v, kind) for v in values) for kind in (str, (int, float)))


def _format_trace_id(trace_id: int) -> str:
    return f"{trace_id:032x}"


def _format_span_id(span_id: int) -> str:
    return f"{span_id:016x}"


class _FromOpenTelemetry(BaseModel):
    model_config = ConfigDict(extra="allow")


class SpanContext(_FromOpenTelemetry):
    """Identity of a span; ids are hexadecimal text of 32 and 16 digits."""

    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: TraceState

    @classmethod
    def from_opentelemetry(cls, src: "otel.SpanContext") -> "SpanContext":
        return cls(
            trace_id=_format_trace_id(src.trace_id),
            span_id=_format_span_id(src.span_id),
            is_remote=src.is_remote,
            trace_state=dict(src.trace_state) if src.trace_state else {},
        )


class TraceStatus(_FromOpenTelemetry):
    """Outcome of a span."""

    status_code: str
    """`UNSET`, `OK` or `ERROR`."""
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, src: "otel.Status") -> "TraceStatus":
        extra = extract_extra_fields(src, ["status_code", "description"])
        return cls(status_code=src.status_code.name, description=src.description, **extra)


class Event(_FromOpenTelemetry):
    """Something that happened during a span."""

    name: str
    attributes: Attributes
    timestamp: float | None = None

    @classmethod
    def from_opentelemetry(cls, src: "SdkEvent") -> "Event":
        extra = extract_extra_fields(src, ["name", "attributes", "timestamp"])
        return cls(
            name=src.name, attributes=_attributes(src.attributes), timestamp=convert_timestamp(src.timestamp), **extra
        )


class Link(_FromOpenTelemetry):
    """A reference to another span."""

    context: SpanContext
    attributes: Attributes | None = None

    @classmethod
    def from_opentelemetry(cls, src: "otel.Link") -> "Link":
        extra = extract_extra_fields(src, ["context", "attributes"])
        attributes = _attributes(src.attributes) if src.attributes else None
        return cls(context=SpanContext.from_opentelemetry(src.context), attributes=attributes, **extra)


class OtelResource(BaseModel):
    """The process or service a span comes from."""

    attributes: Attributes
    schema_url: str

    @classmethod
    def from_opentelemetry(cls, src: "SdkResource") -> "OtelResource":
        return cls(attributes=_attributes(src.attributes), schema_url=src.schema_url or "")


class SpanCoreFields(BaseModel):
    """A span before it belongs to a rollout."""

    name: str
    status: TraceStatus
    attributes: Attributes
    start_time: float | None = None
    end_time: float | None = None


class SpanRecordingContext(Protocol):
    """A span being written, as `Tracer.operation_context` hands it out."""

    def record_exception(self, exception: BaseException) -> None: ...

    def record_attributes(self, attributes: Attributes) -> None: ...

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None: ...

    def get_recorded_span(self) -> SpanCoreFields: ...


_MODELLED_FIELDS: tuple[str, ...]
_MODELLED_FIELDS = ("name", "context", "parent", "resource", "attributes", "events", "links", "start_time", "end_time")
_MODELLED_FIELDS += ("status", "span_processor", "rollout_id", "attempt_id", "trace_id", "span_id", "parent_id")


class Span(_FromOpenTelemetry):
    """One span of one attempt."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """Order within the rollout; several spans of one model call share a number."""
    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    status: TraceStatus
    attributes: Attributes
    events: list[Event]
    links: list[Link]
    start_time: float | None
    """Seconds since the epoch, as is `end_time`."""
    end_time: float | None
    context: SpanContext | None
    parent: SpanContext | None
    resource: OtelResource

    @classmethod
    def from_opentelemetry(cls, src: "ReadableSpan", rollout_id: str, attempt_id: str, sequence_id: int) -> "Span":
        """Convert a finished span of the OpenTelemetry SDK; a span without context gets ids of zeros."""
        context = src.get_span_context()
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=_format_trace_id(context.trace_id if context else 0),
            span_id=_format_span_id(context.span_id if context else 0),
            parent_id=_format_span_id(src.parent.span_id) if src.parent else None,
            name=src.name,
            status=TraceStatus.from_opentelemetry(src.status),
            attributes=_attributes(src.attributes),
            events=[Event.from_opentelemetry(event) for event in src.events or ()],
            links=[Link.from_opentelemetry(link) for link in src.links or ()],
            start_time=convert_timestamp(src.start_time),
            end_time=convert_timestamp(src.end_time),
            context=SpanContext.from_opentelemetry(context) if context else None,
            parent=SpanContext.from_opentelemetry(src.parent) if src.parent else None,
            resource=OtelResource.from_opentelemetry(src.resource),
            **extract_extra_fields(src, _MODELLED_FIELDS),
        )

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Mapping[str, AttributeValue],
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> "Span":
        """A span made by hand; ids that are left out are generated or empty, its contexts are synthesised."""
        trace_id = trace_id or secrets.token_hex(_TRACE_ID_BYTES)
        span_id = span_id or secrets.token_hex(_SPAN_ID_BYTES)
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=name or SpanNames.VIRTUAL.value,
            status=status or TraceStatus(status_code="OK"),
            attributes=dict(attributes),
            events=[],
            links=[],
            start_time=start_time,
            end_time=end_time,
            context=_local_context(trace_id, span_id),
            parent=_local_context(trace_id, parent_id) if parent_id else None,
            resource=resource or OtelResource(attributes={}, schema_url=""),
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
    ) -> "Span":
        """A span of an attempt from the fields recorded before it had one."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            status=core.status,
            start_time=core.start_time if core.start_time is not None else time.time(),
            end_time=core.end_time,
        )


def _local_context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})


SpanLike: TypeAlias = Union["ReadableSpan", Span]
