"""Spans to events, and events to spans.

A span that reports one thing (a reward, a message, an object, an exception) is that one event. Any other span is work:
it starts, may contain messages, and completes or fails. Virtual spans are no events.

A span names its agent itself, or a span around it does. Inner spans end before outer ones, so only the spans of a whole
attempt contain all names: `events_of_spans` takes those. `AgentNames` collects what is known so far.

A prompt repeats the conversation before it; only its messages after the last one of the assistant are new.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from agentlightning.adapter.call_attributes import messages_of, objects_in, with_recorded_content
from agentlightning.adapter.calls import PROXY_SPANS
from agentlightning.emitter.object import literal_value
from agentlightning.errors import InvalidValue
from agentlightning.events.event import (
    AgentEvent,
    AgentReply,
    BinaryReward,
    CompleteEvent,
    ConfigEvent,
    DataEvent,
    ErrorEvent,
    MessageEvent,
    NamedReward,
    NumericReward,
    ObjectEvent,
    RewardEvent,
    SequenceReward,
    StartEvent,
    StateEvent,
    ToolCall,
    UserMessage,
)
from agentlightning.semconv import (
    AGL_ANNOTATION,
    AGL_EVENT_KIND,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    AGL_REWARD,
    AGL_VIRTUAL,
    COMPLETION,
    PROMPT,
    RESPONSE_ID,
    SPAN_AGENT,
    TOOL_NAME,
    LightningSpanAttributes,
    RewardAttributes,
)
from agentlightning.types import AttributeValue, Span, TraceStatus
from agentlightning.types.agents import agent_name
from agentlightning.types.rewards import reward_payload_of, rewards_of
from agentlightning.utils.json_values import MOST_LEVELS, JsonObject, parsed

# Attributes by which an event that was written as a span is read back as the same event.
_ROLE: Final = "agentlightning.message.role"
_SENDER: Final = "agentlightning.message.sender"
_TOOL: Final = "agentlightning.message.tool"
_TOOL_CALL_ID: Final = "agentlightning.message.tool_call_id"
_TOOL_RESULT: Final = "agentlightning.message.tool_result"
_BODY: Final = LightningSpanAttributes.MESSAGE_BODY.value
_TYPE: Final = LightningSpanAttributes.OBJECT_TYPE.value
_LITERAL: Final = LightningSpanAttributes.OBJECT_LITERAL.value
_JSON: Final = LightningSpanAttributes.OBJECT_JSON.value


_Source = Mapping[str, Any]
"""The fields that all events of a span share."""


class AgentNames:
    """Which agent works in which span, as far as the spans added so far tell."""

    def __init__(self) -> None:
        self._named: dict[str, str | None] = {}
        self._parents: dict[str, str | None] = {}

    def add(self, span: Span) -> None:
        self._named[span.span_id] = agent_name(span.attributes, span.name)
        self._parents[span.span_id] = span.parent_id

    def of(self, span: Span) -> str | None:
        """The agent of the span itself, or of the nearest span around it that names one, within `MOST_LEVELS`."""
        span_id: str | None = span.span_id
        for _ in range(MOST_LEVELS):  # parents may go round in a circle
            if (name := self._named.get(span_id or "")) is not None:
                return name
            span_id = self._parents.get(span_id or "")
        return None


# ---------------------------------------------------------------------- spans to events


def events_of_spans(spans: Iterable[Span]) -> list[AgentEvent]:
    """The events of all spans of an attempt, in the given order, each with its agent.

    If both the agent's tracer and the LLM proxy recorded a model call, its messages come from the tracer's span only.
    """
    kept = with_recorded_content(spans)
    names = AgentNames()
    for span in kept:
        names.add(span)
    traced = {_response_id(span) for span in kept if span.name not in PROXY_SPANS} - {None}
    events: list[AgentEvent] = []
    for span in kept:
        found = events_of(span, agent=names.of(span))
        if span.name in PROXY_SPANS and _response_id(span) in traced:
            found = [event for event in found if not isinstance(event, MessageEvent)]
        events += found
    return events


def events_of(span: Span, *, agent: str | None = None) -> list[AgentEvent]:
    """The events of one span; `agent` does the work if the span names none itself."""
    if span.name == AGL_VIRTUAL:
        return []
    source = {
        "rollout_id": span.rollout_id,
        "attempt_id": span.attempt_id,
        "sequence_id": span.sequence_id,
        "span_id": span.span_id,
        "span_name": span.name,
        "time": span.end_time if span.end_time is not None else span.start_time,
        "agent": agent_name(span.attributes, span.name) or agent,
    }
    for read in (_reward, _message, _object, _state):
        if (event := read(span, source)) is not None:
            return [event]
    return list(_work(span, source))


def _reward(span: Span, source: _Source) -> RewardEvent | None:
    rewards = tuple(NamedReward(reward.name, reward.value) for reward in rewards_of(span))
    if not rewards:
        return None
    value, kind = rewards[0].value, span.attributes.get(AGL_EVENT_KIND)
    if len(rewards) > 1 or kind == SequenceReward.kind:
        return SequenceReward(value=value, rewards=rewards, **source)
    if kind == BinaryReward.kind or isinstance(reward_payload_of(span).get("value"), bool):
        return BinaryReward(value=value, **source)
    return NumericReward(value=value, **source)


def _message(span: Span, source: _Source) -> MessageEvent | None:
    attributes = span.attributes
    body = attributes.get(_BODY, attributes.get("message"))
    if span.name != AGL_MESSAGE or not isinstance(body, str):
        return None
    kind = attributes.get(AGL_EVENT_KIND)
    role = _text(attributes, _ROLE) or ("user" if kind == UserMessage.kind else "assistant")
    fields = {**source, "text": body, "role": role, "sender": _text(attributes, _SENDER) or source["agent"]}
    if kind == ToolCall.kind:
        call_id, result = _text(attributes, _TOOL_CALL_ID), _text(attributes, _TOOL_RESULT)
        return ToolCall(tool=_text(attributes, _TOOL) or "", call_id=call_id, result=result, **fields)
    return AgentReply(**fields) if kind == AgentReply.kind or role == "assistant" else UserMessage(**fields)


def _object(span: Span, source: _Source) -> ObjectEvent | None:
    if span.name != AGL_OBJECT:
        return None
    kind = ConfigEvent if span.attributes.get(AGL_EVENT_KIND) == ConfigEvent.kind else DataEvent
    type_name = _text(span.attributes, _TYPE)
    return kind(value=_value(span.attributes, type_name), type_name=type_name, **source)


def _value(attributes: Mapping[str, AttributeValue], type_name: str | None) -> object:
    """The recorded object; text that cannot be decoded is returned as it is."""
    literal = attributes.get(_LITERAL)
    text = attributes.get(_JSON, attributes.get("object"))
    if literal is not None:
        return literal_value(literal, type_name)
    return parsed(text, literals=False) if isinstance(text, str) else None


def _state(span: Span, source: _Source) -> StateEvent | None:
    """An exception, or a state that was written as an event."""
    kind = span.attributes.get(AGL_EVENT_KIND)
    if span.name == AGL_EXCEPTION or kind == ErrorEvent.kind:
        return _error(span, source)
    if kind == StartEvent.kind:
        return StartEvent(**source)
    return CompleteEvent(**source) if kind == CompleteEvent.kind else None


def _work(span: Span, source: _Source) -> Iterator[AgentEvent]:
    at_start = {**source, "time": span.start_time}
    yield StartEvent(**at_start)
    attributes, agent = span.attributes, source["agent"]
    if (tool := _text(attributes, TOOL_NAME)) is not None:
        arguments, call_id = _text(attributes, "tool.parameters") or "", _text(attributes, "tool.call.id")
        result = _text(attributes, "tool.result")
        yield ToolCall(text=arguments, tool=tool, call_id=call_id, result=result, sender=agent, **source)
    if _is_model_call(attributes):
        for message in _new_messages(messages_of(attributes, "prompt")):
            role = str(message.get("role", "user"))
            yield UserMessage(text=str(message["content"]), role=role, sender=role, **at_start)
        choices = messages_of(attributes, "completion")
        for choice in choices:
            if choice.get("content"):
                role = str(choice.get("role", "assistant"))
                yield AgentReply(text=str(choice["content"]), role=role, sender=agent, **source)
        for call in (call for choice in choices for call in objects_in(choice.get("tool_calls"))):
            called = {**call, **call["function"]} if isinstance(call.get("function"), dict) else call
            arguments, tool = str(called.get("arguments", "")), str(called.get("name", ""))
            yield ToolCall(text=arguments, tool=tool, call_id=_text(call, "id"), sender=agent, **source)
    if span.status.status_code == "ERROR":
        yield _error(span, source)
    elif span.end_time is not None:
        yield CompleteEvent(**source)


def _error(span: Span, source: _Source) -> ErrorEvent:
    """The failure by the span's attributes, else by the exception it recorded last, else by its status."""
    recorded = next((event.attributes for event in reversed(span.events) if event.name == "exception"), {})
    attributes = {**recorded, **span.attributes}
    message = _text(attributes, "exception.message") or span.status.description or ""
    return ErrorEvent(error_type=_text(attributes, "exception.type"), message=message, **source)


def _is_model_call(attributes: Mapping[str, AttributeValue]) -> bool:
    return any(name.startswith((f"{PROMPT}.", f"{COMPLETION}.")) for name in attributes)


def _response_id(span: Span) -> str | None:
    return _text(span.attributes, RESPONSE_ID) if _is_model_call(span.attributes) else None


def _new_messages(messages: Iterable[JsonObject]) -> list[JsonObject]:
    new: list[JsonObject] = []
    for message in messages:
        if message.get("role") == "assistant":
            new.clear()
        elif message.get("content"):
            new.append(message)
    return new


def _text(attributes: Mapping[str, AttributeValue], name: str) -> str | None:
    value = attributes.get(name)
    return None if value is None else str(value)


# ---------------------------------------------------------------------- events to spans


def span_of(event: AgentEvent) -> Span:
    """A span for one event; it keeps the event's ids, and gets a new span id if there is none."""
    names = ((RewardEvent, AGL_REWARD), (MessageEvent, AGL_MESSAGE), (ObjectEvent, AGL_OBJECT))
    name = next((name for kind, name in names if isinstance(event, kind)), AGL_ANNOTATION)
    if isinstance(event, StateEvent):
        name = event.span_name or (AGL_EXCEPTION if isinstance(event, ErrorEvent) else AGL_ANNOTATION)
    return Span.from_attributes(
        attributes=attributes_of(event),
        rollout_id=event.rollout_id,
        attempt_id=event.attempt_id,
        sequence_id=event.sequence_id,
        span_id=event.span_id or None,
        name=name,
        start_time=event.time,
        end_time=event.time,
        status=TraceStatus(status_code="ERROR" if isinstance(event, ErrorEvent) else "OK"),
    )


def attributes_of(event: AgentEvent) -> dict[str, AttributeValue]:
    """The attributes with which a span is read as this event, also by readers that know no events."""
    attributes: dict[str, AttributeValue | None] = {AGL_EVENT_KIND: event.kind, SPAN_AGENT: event.agent}
    if isinstance(event, RewardEvent):
        attributes["reward"] = event.value
        named = (event.rewards if isinstance(event, SequenceReward) else ()) or (NamedReward("primary", event.value),)
        for number, reward in enumerate(named):
            key = f"{LightningSpanAttributes.REWARD.value}.{number}"
            attributes[f"{key}.{RewardAttributes.REWARD_NAME.value}"] = reward.name
            attributes[f"{key}.{RewardAttributes.REWARD_VALUE.value}"] = reward.value
    elif isinstance(event, MessageEvent):
        attributes |= {"message": event.text, _BODY: event.text, _ROLE: event.role, _SENDER: event.sender}
        if isinstance(event, ToolCall):
            attributes |= {_TOOL: event.tool, _TOOL_CALL_ID: event.call_id, _TOOL_RESULT: event.result}
    elif isinstance(event, ObjectEvent):
        attributes |= _object_attributes(event)
    elif isinstance(event, ErrorEvent):
        attributes |= {"exception.type": event.error_type, "exception.message": event.message}
    return {name: value for name, value in attributes.items() if value is not None}


def _object_attributes(event: ObjectEvent) -> dict[str, AttributeValue]:
    value = event.value
    type_name = event.type_name or type(value).__name__
    if isinstance(value, bytes):
        return {_TYPE: type_name, _LITERAL: base64.b64encode(value).decode()}
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        message = f"The object of an event is of type {type_name}, which JSON cannot hold: {error}."
        raise InvalidValue(message) from error
    own: dict[str, AttributeValue] = (
        {_LITERAL: str(value)} if isinstance(value, (str, bool, int, float)) else {_JSON: text}
    )
    return {_TYPE: type_name, "object": text, **own}
