"""Messages: what was said, by whom."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from agentlightning.emitter.emission import EmittedSpan, emit, user_attributes
from agentlightning.emitter.utils import get_tracer
from agentlightning.semconv import AGL_MESSAGE, LightningSpanAttributes
from agentlightning.types import SpanAttributeNames, SpanLike

__all__ = ["emit_message", "emit_conversation", "get_message_value"]

logger = logging.getLogger(__name__)

_BODY = LightningSpanAttributes.MESSAGE_BODY.value
_OLD_BODY = SpanAttributeNames.MESSAGE.value
_SENDER = f"{AGL_MESSAGE}.sender"
_ROLE = f"{AGL_MESSAGE}.role"


def emit_message(
    message: str,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
    *,
    sender: str | None = None,
    role: str | None = None,
) -> EmittedSpan | None:
    """Record a text; anything else is logged as an error and not recorded.

    Args:
        attributes: More to note on the span.
        propagate: False makes the span without sending it anywhere.
        sender: Who speaks, for example the name of an agent.
        role: `user`, `assistant`, `tool` and the like.
    """
    given: object = message
    if not isinstance(given, str):
        logger.error("Message must be a string, not a %s; it is not recorded.", type(given).__name__)
        return None
    noted = user_attributes(attributes)
    if sender is not None:
        noted[_SENDER] = sender
    if role is not None:
        noted[_ROLE] = role
    return emit(AGL_MESSAGE, {**noted, _OLD_BODY: message, _BODY: message}, get_tracer, propagate=propagate)


def emit_conversation(messages: Iterable[Mapping[str, Any]], *, propagate: bool = True) -> list[EmittedSpan]:
    """Record the turns of a conversation, each a mapping with `content` and perhaps `role` and `name`, in order."""
    spans = [
        emit_message(turn["content"], sender=turn.get("name"), role=turn.get("role"), propagate=propagate)
        for turn in messages
    ]
    return [span for span in spans if span is not None]


def get_message_value(span: SpanLike) -> str | None:
    """The text of a message span of either release; None for other spans, and for a body that is no text."""
    attributes = span.attributes or {}
    old = attributes.get(_OLD_BODY) if span.name == AGL_MESSAGE else None
    body = attributes.get(_BODY, old)
    return body if isinstance(body, str) else None
