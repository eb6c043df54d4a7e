"""What is known of one call through the proxy, and the spans it becomes.

A record is plain data: texts and numbers, and the bytes
of the request and of the response as they were. Spans have names that scripts look for: `litellm_request` holds the
messages, settings, token ids and usage as tracers write them, `raw_gen_ai_request` beneath it the bodies as they were
sent and received. Both have the sequence id of their call.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from agentlightning.dialects import DIALECTS, DialectName
from agentlightning.dialects.attributes import VERSION_ATTRIBUTE
from agentlightning.dialects.failures import read_json
from agentlightning.dialects.sse import SseParser
from agentlightning.types import OtelResource, Span, TraceStatus
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)

CALL_SPAN: Final = "litellm_request"
RAW_SPAN: Final = "raw_gen_ai_request"
ATTRIBUTE_PREFIX: Final = "agentlightning.proxy"
Outcome = Literal["open", "answered", "failed", "cancelled", "refused"]
"""`cancelled`: the caller left before the end. `refused`: no backend was called."""

_RAW_FIELDS: Final = ("id", "model", "prompt_token_ids", "choices")
_UNSET: Final = TraceStatus(status_code="UNSET")
_RESOURCE: Final = OtelResource(attributes={"service.name": "agentlightning.llm_proxy"}, schema_url="")


@dataclass(frozen=True)
class Origin:
    """On whose behalf a call is made."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None

    @property
    def attempt(self) -> "Origin":
        """The same, whichever agent calls."""
        return self if self.agent is None else Origin(self.rollout_id, self.attempt_id)


@dataclass
class CallRecord:
    """One call."""

    origin: Origin
    dialect: DialectName
    """The caller's."""
    trace_id: str
    span_id: str
    raw_span_id: str
    parent_id: str | None = None
    """The caller's own span, from its header `traceparent`."""
    sequence_id: int = 0
    """0 lets the store number it."""
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    first_part_seconds: float | None = None
    """From the request to the first part of a streamed response."""
    model: str = ""
    """The requested name."""
    outcome: Outcome = "open"
    status: int = 0
    """The HTTP status that the caller got."""
    error: str | None = None
    is_stream: bool = False
    provider: str = ""
    backend: str = ""
    backend_dialect: DialectName | None = None
    """None if no backend was called."""
    version: str | None = None
    """Version of the model, by the model list when the call was sent."""
    tries: int = 0
    waited_seconds: float = 0.0
    token_ids: Literal["given", "not given", "not asked"] = "not asked"
    replayed_from: str | None = None
    """The span whose response was given again."""
    request: bytes = b""
    """As the caller sent it."""
    sent: bytes = b""
    """As it went to the backend; empty if that is the request."""
    response: bytes = b""
    """As the backend sent it; of a call that broke off, what had come until then."""
    sent_json: Any = field(default=None, repr=False, compare=False)
    answer: Any = field(default=None, repr=False, compare=False)
    """The response as JSON, put together from the events of a stream."""
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens, where the backend said."""
    started_at: float = field(default_factory=time.perf_counter, compare=False)
    """When the request came, for durations."""


def usage_of(answer: Mapping[str, object]) -> tuple[int, int] | None:
    """Prompt and completion tokens."""
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        return None
    read = usage.get("prompt_tokens", usage.get("input_tokens"))
    written = usage.get("completion_tokens", usage.get("output_tokens"))
    return (read if isinstance(read, int) else 0, written if isinstance(written, int) else 0)


def spans_of(record: CallRecord, *, with_raw: bool = False) -> list[Span]:
    """The span of a call and, on request, that of its bodies."""
    answer = _answer_of(record)
    spans = [_span(record, CALL_SPAN, record.span_id, record.parent_id, _call_attributes(record, answer))]
    if with_raw:
        spans.append(_span(record, RAW_SPAN, record.raw_span_id, record.span_id, _raw_attributes(record, answer)))
    return spans


def _answer_of(record: CallRecord) -> Mapping[str, object]:
    """The whole answer; empty for a call that failed before it had one."""
    if record.answer is None and record.response and (record.is_stream or record.outcome == "answered"):
        assembler = DIALECTS[record.backend_dialect or record.dialect].assembler
        if not record.is_stream or record.response.lstrip().startswith(b"{"):
            record.answer = read_json(record.response)
        elif assembler is not None:
            assembled = assembler()
            for event in SseParser().feed(record.response):
                chunk = read_json(event.data)
                if isinstance(chunk, Mapping):
                    assembled.add(chunk)
            record.answer = assembled.response()
    return record.answer if isinstance(record.answer, Mapping) else {}


def _call_attributes(record: CallRecord, answer: Mapping[str, object]) -> dict[str, Any]:
    if record.sent_json is None:
        record.sent_json = read_json(record.sent or record.request)
    dialect = DIALECTS[record.backend_dialect or record.dialect]
    attributes: dict[str, Any] = {}
    # A call of a shape we do not know is still a call.
    with log_failures(logger, "A call of model '%s' could not be read; its span says little of it.", record.model):
        attributes.update(dialect.request_attributes(record.sent_json if isinstance(record.sent_json, Mapping) else {}))
        if answer:
            attributes.update(dialect.response_attributes(answer))
    if record.version is not None:
        attributes.setdefault(VERSION_ATTRIBUTE, record.version)
    if record.first_part_seconds is not None:
        attributes["gen_ai.streaming.time_to_first_token"] = record.first_part_seconds
    if record.outcome == "cancelled":
        attributes["agentlightning.response.is_cut"] = True
    if record.origin.agent is not None:
        attributes["agent.name"] = record.origin.agent
    own: dict[str, Any] = {
        "dialect": record.dialect,
        "requested_model": record.model,
        "outcome": record.outcome,
        "http_status": record.status,
        "token_ids": record.token_ids,
        "tries": record.tries,
    }
    for name in ("backend", "provider", "version", "replayed_from", "waited_seconds"):
        if value := getattr(record, name):
            own[name] = value
    if record.backend_dialect not in (None, record.dialect):
        own["backend_dialect"] = record.backend_dialect
    return attributes | {f"{ATTRIBUTE_PREFIX}.{name}": value for name, value in own.items()}


def _raw_attributes(record: CallRecord, answer: Mapping[str, object]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    if record.outcome in ("answered", "cancelled"):
        for name in _RAW_FIELDS:
            value = answer.get(name)
            if value is not None and value != []:
                shown = value if isinstance(value, str) else orjson.dumps(value).decode()
                raw[f"llm.{record.provider or 'none'}.{name}"] = shown
    bodies = {"request_body": record.sent or record.request, "response_body": record.response}
    if record.sent and record.sent != record.request:
        bodies["received_body"] = record.request
    # Bytes that are not UTF-8 are shown escaped: a span holds text.
    texts = {name: body.decode("utf-8", "backslashreplace") for name, body in bodies.items()}
    return raw | {f"{ATTRIBUTE_PREFIX}.{name}": text for name, text in texts.items()}


def _span(record: CallRecord, name: str, span_id: str, parent_id: str | None, attributes: dict[str, Any]) -> Span:
    is_error = record.outcome in ("failed", "refused")
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=record.origin.rollout_id,
        attempt_id=record.origin.attempt_id,
        sequence_id=record.sequence_id,
        name=name,
        trace_id=record.trace_id,
        span_id=span_id,
        parent_id=parent_id,
        start_time=record.started,
        end_time=record.ended,
        resource=_RESOURCE,
        status=TraceStatus(status_code="ERROR", description=record.error) if is_error else _UNSET,
    )
