"""What a rollout tells the reflecting model: its task, its conversations, and what became of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.adapter import TraceToMessages
from agentlightning.adapter.messages import OpenAIMessages
from agentlightning.emitter import find_reward_spans, get_message_value, get_rewards_from_span
from agentlightning.semconv import AGL_EXCEPTION
from agentlightning.types import Span

__all__ = ["ReflectiveRecord", "reflective_record"]

ReflectiveRecord = dict[str, str]
"""One example of a reflection prompt: texts by their headings."""

MOST_CHARACTERS: Final = 12_000
"""Of one text; of a longer one the middle is left out."""
_EXCEPTION_KEYS: Final = ("exception.type", "exception.message")


def reflective_record(
    task: Any, spans: Sequence[Span], *, reward: str, error: str | None, adapter: TraceToMessages
) -> ReflectiveRecord:
    """The example that a rollout makes.

    Args:
        reward: What to say of its reward.
        error: Why the rollout failed; None if it did not.
    """
    notes = [reward, *_further_rewards(spans), *_remarks(spans)]
    try:
        said = "\n\n".join(map(_conversation, _whole_conversations(adapter.adapt(list(spans)))))
    except ValueError as unreadable:
        said = ""
        notes.append(f"The trace could not be read: {unreadable}")
    if error is not None:
        notes.append(f"The rollout failed; {error}")
    return {
        "Inputs": _shortened(_as_text(task)),
        "Generated Outputs": _shortened(said) or "(no model call was recorded)",
        "Feedback": _shortened("\n".join(notes)),
    }


def _further_rewards(spans: Sequence[Span]) -> list[str]:
    """The parts of the last reward, where it has several."""
    rewarded = find_reward_spans(spans)
    parts = get_rewards_from_span(rewarded[-1]) if rewarded else []
    return [f"Reward for '{part.name}': {part.value:g}" for part in parts] if len(parts) > 1 else []


def _remarks(spans: Sequence[Span]) -> list[str]:
    """What the agent, or whoever judged it, emitted as messages and exceptions."""
    remarks = []
    for span in spans:
        message = get_message_value(span)
        if message:
            remarks.append(message)
        if span.name == AGL_EXCEPTION:
            remarks.append(": ".join(str(span.attributes[key]) for key in _EXCEPTION_KEYS if key in span.attributes))
    return remarks


def _whole_conversations(calls: Sequence[OpenAIMessages]) -> list[OpenAIMessages]:
    """Without those that a later call goes on with; its prompt holds them."""
    return [
        call
        for number, call in enumerate(calls)
        if not any(_goes_on(call["messages"], later["messages"]) for later in calls[number + 1 :])
    ]


def _goes_on(earlier: Sequence[Mapping[str, Any]], later: Sequence[Mapping[str, Any]]) -> bool:
    asked = len(earlier) - 1
    return len(later) > len(earlier) and list(later[:asked]) == list(earlier[:asked])


def _conversation(call: OpenAIMessages) -> str:
    return "\n\n".join(f"[{message.get('role', 'unknown')}]\n{_said(message)}" for message in call["messages"])


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [] if content is None else [_as_text(content)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"calls the tool {function.get('name')} with {function.get('arguments')}")
    return "\n".join(parts)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
