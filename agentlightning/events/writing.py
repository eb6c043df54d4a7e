"""From events to attributes and spans, which reading turns into the same events again."""

import base64
import json

from agentlightning.errors import InvalidValue
from agentlightning.events.event import (
    AgentEvent,
    ErrorEvent,
    MessageEvent,
    NamedReward,
    ObjectEvent,
    RewardEvent,
    SequenceReward,
    StateEvent,
    ToolCall,
)
from agentlightning.events.rewards import PRIMARY, reward_attributes
from agentlightning.events.vocabulary import (
    AGENT_NAME,
    EVENT_KIND,
    MESSAGE_ROLE,
    MESSAGE_SENDER,
    OLD_MESSAGE,
    OLD_OBJECT,
    TOOL_CALL_ID,
    TOOL_NAME,
    TOOL_RESULT,
)
from agentlightning.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    AGL_REWARD,
    LightningSpanAttributes,
)
from agentlightning.types import AttributeValue, Span, TraceStatus

__all__ = ["attributes_of", "span_of"]

_LITERALS = (str, bool, int, float)


def attributes_of(event: AgentEvent) -> dict[str, AttributeValue]:
    """What a span must carry to be this event; None is left out."""
    told: dict[str, AttributeValue | None] = {EVENT_KIND: event.kind, AGENT_NAME: event.agent}
    if isinstance(event, RewardEvent):
        told |= reward_attributes(_rewards(event))
    elif isinstance(event, MessageEvent):
        told |= _of_message(event)
    elif isinstance(event, ObjectEvent):
        told |= _of_object(event)
    elif isinstance(event, ErrorEvent):
        told |= {"exception.type": event.error_type, "exception.message": event.message}
    return {name: value for name, value in told.items() if value is not None}


def span_of(event: AgentEvent) -> Span:
    """A span of its own for an event; it keeps the event's ids, and gets a new span id if there is none."""
    code = "ERROR" if isinstance(event, ErrorEvent) else "OK"
    return Span.from_attributes(
        attributes=attributes_of(event),
        rollout_id=event.rollout_id,
        attempt_id=event.attempt_id,
        sequence_id=event.sequence_id,
        span_id=event.span_id or None,
        name=_span_name(event),
        start_time=event.time,
        end_time=event.time,
        status=TraceStatus(status_code=code),
    )


def _span_name(event: AgentEvent) -> str:
    if isinstance(event, StateEvent):
        return event.span_name or (AGL_EXCEPTION if isinstance(event, ErrorEvent) else AGL_ANNOTATION)
    names = ((RewardEvent, AGL_REWARD), (MessageEvent, AGL_MESSAGE), (ObjectEvent, AGL_OBJECT))
    return next((name for kind, name in names if isinstance(event, kind)), AGL_ANNOTATION)


def _rewards(event: RewardEvent) -> tuple[NamedReward, ...]:
    several = event.rewards if isinstance(event, SequenceReward) else ()
    return several or (NamedReward(PRIMARY, event.value),)


def _of_message(event: MessageEvent) -> dict[str, AttributeValue | None]:
    told: dict[str, AttributeValue | None] = {
        OLD_MESSAGE: event.text,
        LightningSpanAttributes.MESSAGE_BODY.value: event.text,
        MESSAGE_ROLE: event.role,
        MESSAGE_SENDER: event.sender,
    }
    if isinstance(event, ToolCall):
        told |= {TOOL_NAME: event.tool, TOOL_CALL_ID: event.call_id, TOOL_RESULT: event.result}
    return told


def _of_object(event: ObjectEvent) -> dict[str, AttributeValue | None]:
    value = event.value
    type_name = event.type_name or type(value).__name__
    told: dict[str, AttributeValue | None] = {LightningSpanAttributes.OBJECT_TYPE.value: type_name}
    if isinstance(value, bytes):
        return {**told, LightningSpanAttributes.OBJECT_LITERAL.value: base64.b64encode(value).decode()}
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidValue(
            f"The object of an event is of type {type_name}, which JSON cannot hold: {error}."
        ) from error
    own = (
        LightningSpanAttributes.OBJECT_LITERAL if isinstance(value, _LITERALS) else LightningSpanAttributes.OBJECT_JSON
    )
    return {**told, OLD_OBJECT: text, own.value: value if isinstance(value, _LITERALS) else text}
