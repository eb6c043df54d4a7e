"""The messages of a model call, as its span carries them: `gen_ai.prompt.*`, `gen_ai.completion.*` and `tool.*`.

Every prompt repeats the conversation before it. Only what is new counts as said in this call: the prompt's messages
behind the last one of the agent.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentlightning.types import AttributeValue

__all__ = [
    "CallOfTool",
    "Said",
    "is_model_call",
    "is_proxied",
    "new_messages",
    "replies",
    "response_id",
    "tool_call",
    "tool_calls",
]

_PROMPT = "gen_ai.prompt"
_COMPLETION = "gen_ai.completion"
_AGENT_ROLE = "assistant"
_RESPONSE_ID = "gen_ai.response.id"
_PROXY_SPANS = ("litellm_request", "raw_gen_ai_request")


@dataclass(frozen=True)
class Said:
    """One message."""

    role: str
    text: str


@dataclass(frozen=True)
class CallOfTool:
    """One call of a tool."""

    tool: str
    arguments: str
    call_id: str | None = None
    result: str | None = None


def is_model_call(attributes: Mapping[str, AttributeValue]) -> bool:
    return any(name.startswith((f"{_PROMPT}.", f"{_COMPLETION}.")) for name in attributes)


def is_proxied(span_name: str) -> bool:
    """Whether the LLM proxy wrote the span; the agent's own tracer may have written one of the same call."""
    return span_name in _PROXY_SPANS


def response_id(attributes: Mapping[str, AttributeValue]) -> str | None:
    """The id that the answer has wherever it was recorded; None if there was no answer, or it had none."""
    return _text(attributes.get(_RESPONSE_ID)) if is_model_call(attributes) else None


def new_messages(attributes: Mapping[str, AttributeValue]) -> list[Said]:
    """What the model had not heard before, as far as the prompt tells."""
    prompt = [_said(entry, "user") for entry in _entries(attributes, _PROMPT)]
    heard = max((place for place, said in enumerate(prompt, 1) if said.role == _AGENT_ROLE), default=0)
    return [said for said in prompt[heard:] if said.text]


def replies(attributes: Mapping[str, AttributeValue]) -> list[Said]:
    """What the model said, one for each choice that has words."""
    said = [_said(entry, _AGENT_ROLE) for entry in _entries(attributes, _COMPLETION)]
    return [reply for reply in said if reply.text]


def tool_calls(attributes: Mapping[str, AttributeValue]) -> Iterator[CallOfTool]:
    """The calls the model asked for."""
    for entry in _entries(attributes, _COMPLETION):
        for call in _entries(entry, "tool_calls"):
            name = call.get("name", call.get("function.name", ""))
            arguments = call.get("arguments", call.get("function.arguments", ""))
            yield CallOfTool(str(name), str(arguments), _text(call.get("id")))


def tool_call(attributes: Mapping[str, AttributeValue]) -> CallOfTool | None:
    """The call whose work a span is; None if it is not the work of a tool."""
    name = _text(attributes.get("tool.name"))
    if name is None:
        return None
    arguments = _text(attributes.get("tool.parameters")) or ""
    call_id, result = _text(attributes.get("tool.call.id")), _text(attributes.get("tool.result"))
    return CallOfTool(name, arguments, call_id, result)


def _said(entry: Mapping[str, AttributeValue], role: str) -> Said:
    return Said(str(entry.get("role", role)), str(entry.get("content", "")))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _entries(attributes: Mapping[str, AttributeValue], prefix: str) -> list[dict[str, AttributeValue]]:
    """The numbered groups below a prefix, in order, each with the rest of its names."""
    pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.(.+)")
    groups: dict[int, dict[str, AttributeValue]] = {}
    for name, value in attributes.items():
        if match := pattern.fullmatch(name):
            groups.setdefault(int(match[1]), {})[match[2]] = value
    return [groups[number] for number in sorted(groups)]
