"""From spans to events.

A span that says one thing (a reward, a message, an object, an exception) is that one event. Any other span is work: it
starts, may say things in between, and completes or fails. Made-up spans are no events.

Whose work a span is, it says itself or a span around it does. Spans are delivered when they end, the inner ones before
the outer ones, so only who has all spans of an attempt knows all names: `events_of_spans` does. `AgentNames` collects
what is known so far.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentlightning.events import model_calls
from agentlightning.events.event import (
    AgentEvent,
    AgentReply,
    BinaryReward,
    CompleteEvent,
    ConfigEvent,
    DataEvent,
    ErrorEvent,
    MessageEvent,
    NumericReward,
    ObjectEvent,
    SequenceReward,
    StartEvent,
    StateEvent,
    ToolCall,
    UserMessage,
)
from agentlightning.events.rewards import is_reward_binary, rewards_of
from agentlightning.events.vocabulary import (
    EVENT_KIND,
    MESSAGE_ROLE,
    MESSAGE_SENDER,
    OLD_MESSAGE,
    OLD_OBJECT,
    TOOL_CALL_ID,
    TOOL_NAME,
    TOOL_RESULT,
)
from agentlightning.instrumentation.model_calls import with_recorded_content
from agentlightning.semconv import AGL_EXCEPTION, AGL_MESSAGE, AGL_OBJECT, AGL_VIRTUAL, LightningSpanAttributes
from agentlightning.types import AttributeValue, Span
from agentlightning.types.agent_names import agent_name

__all__ = ["AgentNames", "events_of", "events_of_spans"]

_ERROR = "ERROR"
_OBJECT_EVENTS: dict[str, type[ObjectEvent]] = {ConfigEvent.kind: ConfigEvent}
_STATE_EVENTS: dict[str, type[StateEvent]] = {StartEvent.kind: StartEvent, CompleteEvent.kind: CompleteEvent}


class AgentNames:
    """Who works in which span, as far as the spans seen so far tell."""

    def __init__(self) -> None:
        self._named: dict[str, str | None] = {}
        self._parents: dict[str, str | None] = {}

    def add(self, span: Span) -> None:
        self._named[span.span_id] = agent_name(span.attributes, span.name)
        self._parents[span.span_id] = span.parent_id

    def of(self, span: Span) -> str | None:
        """The agent of the span itself, or of the nearest span around it that names one."""
        visited: set[str] = set()
        span_id: str | None = span.span_id
        while span_id is not None and span_id not in visited:
            if (name := self._named.get(span_id)) is not None:
                return name
            visited.add(span_id)
            span_id = self._parents.get(span_id)
        return None


def events_of_spans(spans: Iterable[Span]) -> list[AgentEvent]:
    """The events of spans in the given order, each with its agent; give it all spans of an attempt.

    What was said in a call that the LLM proxy recorded besides the agent's own tracer is told once, by the tracer.
    """
    kept = with_recorded_content(spans)
    names = AgentNames()
    for span in kept:
        names.add(span)
    told = {model_calls.response_id(span.attributes) for span in kept if not model_calls.is_proxied(span.name)} - {None}
    events: list[AgentEvent] = []
    for span in kept:
        told_already = model_calls.is_proxied(span.name) and model_calls.response_id(span.attributes) in told
        found = events_of(span, agent=names.of(span))
        events += [event for event in found if not (told_already and isinstance(event, MessageEvent))]
    return events


def events_of(span: Span, *, agent: str | None = None) -> list[AgentEvent]:
    """The events of one span; `agent` is whose work it is, if the span does not say so itself."""
    if span.name == AGL_VIRTUAL:
        return []
    whose = agent_name(span.attributes, span.name) or agent
    source: dict[str, Any] = {"rollout_id": span.rollout_id, "attempt_id": span.attempt_id, "agent": whose}
    source |= {"sequence_id": span.sequence_id, "span_id": span.span_id, "span_name": span.name}
    source["time"] = span.end_time if span.end_time is not None else span.start_time
    for read in _STATEMENTS:
        if (event := read(span, source)) is not None:
            return [event]
    return list(_work(span, source))


# ---------------------------------------------------------------------- spans that say one thing


def _reward(span: Span, source: Mapping[str, Any]) -> AgentEvent | None:
    rewards = rewards_of(span)
    if not rewards:
        return None
    value, kind = rewards[0].value, span.attributes.get(EVENT_KIND)
    if len(rewards) > 1 or kind == SequenceReward.kind:
        return SequenceReward(value=value, rewards=rewards, **source)
    if kind == BinaryReward.kind or is_reward_binary(span):
        return BinaryReward(value=value, **source)
    return NumericReward(value=value, **source)


def _message(span: Span, source: Mapping[str, Any]) -> AgentEvent | None:
    body = span.attributes.get(LightningSpanAttributes.MESSAGE_BODY.value, span.attributes.get(OLD_MESSAGE))
    if span.name != AGL_MESSAGE or not isinstance(body, str):
        return None
    kind = span.attributes.get(EVENT_KIND)
    role = _text(span.attributes, MESSAGE_ROLE) or ("user" if kind == UserMessage.kind else "assistant")
    sender = _text(span.attributes, MESSAGE_SENDER) or source["agent"]
    said: dict[str, Any] = {**source, "text": body, "role": role, "sender": sender}
    if kind == ToolCall.kind:
        call_id, result = _text(span.attributes, TOOL_CALL_ID), _text(span.attributes, TOOL_RESULT)
        return ToolCall(tool=_text(span.attributes, TOOL_NAME) or "", call_id=call_id, result=result, **said)
    if kind == AgentReply.kind or role == "assistant":
        return AgentReply(**said)
    return UserMessage(**said)


def _object(span: Span, source: Mapping[str, Any]) -> AgentEvent | None:
    if span.name != AGL_OBJECT:
        return None
    made = _OBJECT_EVENTS.get(str(span.attributes.get(EVENT_KIND)), DataEvent)
    type_name = _text(span.attributes, LightningSpanAttributes.OBJECT_TYPE.value)
    return made(value=_value(span.attributes, type_name), type_name=type_name, **source)


def _value(attributes: Mapping[str, AttributeValue], type_name: str | None) -> Any:
    """The recorded object; a text that is not what it should be is given as it stands."""
    literal = attributes.get(LightningSpanAttributes.OBJECT_LITERAL.value)
    text = attributes.get(LightningSpanAttributes.OBJECT_JSON.value, attributes.get(OLD_OBJECT))
    try:
        if literal is not None:
            return base64.b64decode(str(literal), validate=True) if type_name == "bytes" else literal
        return json.loads(text) if isinstance(text, str) else None
    except (binascii.Error, ValueError):
        return literal if literal is not None else text


def _exception(span: Span, source: Mapping[str, Any]) -> AgentEvent | None:
    return _failure(span, source) if span.name == AGL_EXCEPTION else None


def _state(span: Span, source: Mapping[str, Any]) -> AgentEvent | None:
    """A state that was written as such, not derived from work."""
    kind = str(span.attributes.get(EVENT_KIND))
    if kind == ErrorEvent.kind:
        return _failure(span, source)
    made = _STATE_EVENTS.get(kind)
    return None if made is None else made(**source)


_Reader = Callable[[Span, Mapping[str, Any]], AgentEvent | None]
_STATEMENTS: tuple[_Reader, ...] = (_reward, _message, _object, _exception, _state)


# ---------------------------------------------------------------------- spans that are work


def _work(span: Span, source: Mapping[str, Any]) -> Iterator[AgentEvent]:
    yield StartEvent(**{**source, "time": span.start_time})
    yield from _conversation(span, source)
    if span.status.status_code == _ERROR:
        yield _failure(span, source)
    elif span.end_time is not None:
        yield CompleteEvent(**source)


def _conversation(span: Span, source: Mapping[str, Any]) -> Iterator[AgentEvent]:
    if (call := model_calls.tool_call(span.attributes)) is not None:
        yield _tool_event(call, source)
    if not model_calls.is_model_call(span.attributes):
        return
    for said in model_calls.new_messages(span.attributes):
        yield UserMessage(text=said.text, role=said.role, sender=said.role, **{**source, "time": span.start_time})
    for said in model_calls.replies(span.attributes):
        yield AgentReply(text=said.text, role=said.role, sender=source["agent"], **source)
    for asked in model_calls.tool_calls(span.attributes):
        yield _tool_event(asked, source)


def _tool_event(call: model_calls.CallOfTool, source: Mapping[str, Any]) -> ToolCall:
    said = ToolCall(text=call.arguments, tool=call.tool, sender=source["agent"], **source)
    return replace(said, call_id=call.call_id, result=call.result)


def _failure(span: Span, source: Mapping[str, Any]) -> ErrorEvent:
    """What went wrong: as the span says, else as the exception it recorded last, else as its status."""
    recorded = next((event.attributes for event in reversed(span.events) if event.name == "exception"), {})
    told = {**recorded, **span.attributes}
    message = _text(told, "exception.message") or span.status.description or ""
    return ErrorEvent(error_type=_text(told, "exception.type"), message=message, **source)


def _text(attributes: Mapping[str, AttributeValue], name: str) -> str | None:
    value = attributes.get(name)
    return None if value is None else str(value)
