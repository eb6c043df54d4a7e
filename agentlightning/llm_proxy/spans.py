"""A call becomes spans: what was asked and answered in words, and below it what went over the wire.

Both have names that scripts look for: `litellm_request` holds the messages, settings, token
ids and usage as tracers write them, `raw_gen_ai_request` the bodies as they were sent and received. They share the
sequence id of their call.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any, Final

import orjson

from agentlightning.dialects import ANTHROPIC_DIALECTS, OPENAI_DIALECTS, Dialect, DialectName
from agentlightning.dialects.sse import SseParser
from agentlightning.llm_proxy.records import CallRecord
from agentlightning.store.values import replaced
from agentlightning.types import OtelResource, Span, TraceStatus

__all__ = ["CALL_SPAN", "DIALECTS", "RAW_SPAN", "spans_of"]

logger = logging.getLogger(__name__)

CALL_SPAN: Final = "litellm_request"
RAW_SPAN: Final = "raw_gen_ai_request"

DIALECTS: Final[dict[DialectName, Dialect]] = {
    "chat": OPENAI_DIALECTS["/chat/completions"],
    "completions": OPENAI_DIALECTS["/completions"],
    "responses": OPENAI_DIALECTS["/responses"],
    "embeddings": OPENAI_DIALECTS["/embeddings"],
    "messages": ANTHROPIC_DIALECTS["/v1/messages"],
}

_HERE: Final = "agentlightning.proxy"
_RAW_FIELDS: Final = ("id", "model", "prompt_token_ids", "choices")
_DONE: Final = b"[DONE]"
_UNSET = TraceStatus(status_code="UNSET")


def spans_of(record: CallRecord, *, with_raw: bool = False) -> list[Span]:
    """The span of a call and, if asked for, that of its bodies."""
    asked, answer = _request_of(record), _answer_of(record)
    attributes = _attributes(record, asked, answer)
    spans = [_span(record, CALL_SPAN, record.span_id, record.parent_id, attributes)]
    if with_raw:
        spans.append(_span(record, RAW_SPAN, record.raw_span_id, record.span_id, _raw_attributes(record, answer)))
    return spans


def _request_of(record: CallRecord) -> Mapping[str, Any]:
    if record.asked is None:
        record.asked = _read(record.sent or record.request)
    return record.asked if isinstance(record.asked, Mapping) else {}


def _answer_of(record: CallRecord) -> Mapping[str, Any]:
    """The answer, whole; of a stream, put together from its events. Empty for a call that failed before it had one."""
    if record.answer is None and record.response and (record.is_stream or record.outcome == "answered"):
        record.answer = _assembled(record) if _is_stream(record) else _read(record.response)
    return record.answer if isinstance(record.answer, Mapping) else {}


def _is_stream(record: CallRecord) -> bool:
    return record.is_stream and not record.response.lstrip().startswith(b"{")


def _assembled(record: CallRecord) -> Mapping[str, Any]:
    assembler = DIALECTS[record.backend_dialect or record.dialect].assembler
    if assembler is None:
        return {}
    assembled = assembler()
    for event in _events_in(record.response):
        if isinstance(event, Mapping):
            assembled.add(event)
    return assembled.response()


def _events_in(stream: bytes) -> list[Any]:
    return [_read(event.data) for event in SseParser().feed(stream) if event.data != _DONE]


def _read(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        return None


def _attributes(record: CallRecord, asked: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    dialect = DIALECTS[record.backend_dialect or record.dialect]
    attributes: dict[str, Any] = {}
    try:
        attributes.update(dialect.request_attributes(asked))
        if answer:
            attributes.update(dialect.response_attributes(answer))
    except Exception:  # a call of a shape we do not know is still a call
        logger.exception("A call of model '%s' could not be read; its span says little of it.", record.model)
    if record.version is not None:
        attributes.setdefault("agentlightning.weights_version", record.version)
    if record.first_part_seconds is not None:
        attributes["gen_ai.streaming.time_to_first_token"] = record.first_part_seconds
    if record.outcome == "cancelled":
        attributes["agentlightning.response.is_cut"] = True
    if record.origin.agent is not None:
        attributes["agent.name"] = record.origin.agent
    attributes.update(_proxy_attributes(record))
    return attributes


def _proxy_attributes(record: CallRecord) -> dict[str, Any]:
    """What the proxy did for the call."""
    said: dict[str, Any] = {
        f"{_HERE}.dialect": record.dialect,
        f"{_HERE}.requested_model": record.model,
        f"{_HERE}.outcome": record.outcome,
        f"{_HERE}.http_status": record.status,
        f"{_HERE}.token_ids": record.token_ids,
        f"{_HERE}.tries": record.tries,
    }
    for name in ("backend", "provider", "version", "replayed_from"):
        value = getattr(record, name)
        if value:
            said[f"{_HERE}.{name}"] = value
    if record.backend_dialect not in (None, record.dialect):
        said[f"{_HERE}.backend_dialect"] = record.backend_dialect
    if record.waited_seconds:
        said[f"{_HERE}.waited_seconds"] = record.waited_seconds
    return said


def _raw_attributes(record: CallRecord, answer: Mapping[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    prefix = f"llm.{record.provider or 'none'}"
    if record.outcome in ("answered", "cancelled"):
        for name in _RAW_FIELDS:
            value = answer.get(name)
            if value is not None and value != []:
                raw[f"{prefix}.{name}"] = value if isinstance(value, str) else orjson.dumps(value).decode()
    raw[f"{_HERE}.request_body"] = _text(record.sent or record.request)
    raw[f"{_HERE}.response_body"] = _text(record.response)
    if record.sent and record.sent != record.request:
        raw[f"{_HERE}.received_body"] = _text(record.request)
    return raw


def _text(body: bytes) -> str:
    """Bytes that are not UTF-8 are shown escaped: a span holds text."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode("utf-8", "backslashreplace")


@functools.cache
def _pattern(has_parent: bool) -> Span:
    """What all spans of the proxy have in common."""
    return Span.from_attributes(
        attributes={},
        parent_id="0" * 16 if has_parent else None,
        status=_UNSET,
        resource=OtelResource(attributes={"service.name": "agentlightning.llm_proxy"}, schema_url=""),
    )


def _span(record: CallRecord, name: str, span_id: str, parent_id: str | None, attributes: dict[str, Any]) -> Span:
    pattern = _pattern(parent_id is not None)
    assert pattern.context is not None
    context = replaced(pattern.context, trace_id=record.trace_id, span_id=span_id, trace_state={})
    parent = None if parent_id is None else replaced(context, span_id=parent_id, trace_state={})
    status = _UNSET
    if record.outcome in ("failed", "refused"):
        status = TraceStatus(status_code="ERROR", description=record.error)
    return replaced(
        pattern,
        rollout_id=record.origin.rollout_id,
        attempt_id=record.origin.attempt_id,
        sequence_id=record.sequence_id,
        trace_id=record.trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        status=status,
        attributes=attributes,
        events=[],
        links=[],
        start_time=record.started,
        end_time=record.ended,
        context=context,
        parent=parent,
    )
