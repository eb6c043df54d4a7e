"""What the text of a model means: thoughts, an answer, and tool calls in the ways models write them.

    <think> … </think>                                          thoughts, before everything else
    <tool_call>{"name": …, "arguments": {…}}</tool_call>        Hermes, Qwen and many others
    {"name": …, "parameters": {…}}                              Llama 3, as the whole answer

Anything else is text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol
from uuid import uuid4

from agentlightning.engine.codec import (
    CallArguments,
    CallStarted,
    ContentDelta,
    Delta,
    ParsedMessage,
    ReasoningDelta,
    ToolCall,
)
from agentlightning.engine.speaking import StopText

__all__ = ["HfParser", "parsed_text"]

_CALL: Final = "<tool_call>"
_CALLS: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_THINK: Final = "<think>"
_THOUGHT: Final = "</think>"


class _Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...


def parsed_text(text: str, *, has_tools: bool) -> ParsedMessage:
    """The message that a text stands for; tool calls are looked for only where there are tools."""
    reasoning, text = _thoughts(text)
    if not has_tools:
        return ParsedMessage(text, reasoning=reasoning)
    if _CALL in text:
        before = text[: text.index(_CALL)]
        calls = [call for found in _CALLS.findall(text) if (call := _call(found, "arguments")) is not None]
        if calls:
            return ParsedMessage(before if before.strip() else None, calls, reasoning)
    call = _call(text.strip(), "parameters") if text.lstrip().startswith("{") else None
    if call is not None:
        return ParsedMessage(None, [call], reasoning)
    return ParsedMessage(text, reasoning=reasoning)


def _thoughts(text: str) -> tuple[str | None, str]:
    """Thoughts may have begun in the prompt, so the end of them is what counts."""
    if _THOUGHT not in text:
        return None, text
    thoughts, _, rest = text.partition(_THOUGHT)
    return thoughts.lstrip().removeprefix(_THINK).strip("\n"), rest.lstrip("\n")


def _call(text: str, parameter_name: str) -> ToolCall | None:
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(written, dict) or not isinstance(written.get("name"), str):
        return None
    arguments: Any = written.get(parameter_name, written.get("arguments", written.get("parameters")))
    if arguments is None:
        return None
    said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{uuid4().hex[:24]}", written["name"], said)


class HfParser:
    """Parses one message token by token; text that may be a tool call or a thought is held back until it is known."""

    def __init__(self, codec: _Decoder, *, has_tools: bool) -> None:
        self._codec = codec
        self._has_tools = has_tools
        self._token_ids: list[int] = []
        self._said = ""
        self._stop = StopText([_CALL])
        self._decoded = 0
        self._context = 0
        self._text = ""
        self._looked_at = 0
        """Characters of the text that were told, or held back as the beginning of a call."""

    def add(self, token_id: int) -> list[Delta]:
        """What is certain after this token."""
        self._token_ids.append(token_id)
        before = self._codec.decode(self._token_ids[self._context : self._decoded])
        now = self._codec.decode(self._token_ids[self._context :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return []
        self._context, self._decoded = self._decoded, len(self._token_ids)
        self._text += now[len(before) :]
        if self._may_mean_more():
            return []
        pending, self._looked_at = self._text[self._looked_at :], len(self._text)
        certain = self._stop.add(pending) if self._has_tools else pending
        self._said += certain
        return [ContentDelta(certain)] if certain else []

    def finish(self) -> list[Delta]:
        """What was held back, read as a whole."""
        parsed = parsed_text(self._codec.decode(self._token_ids), has_tools=self._has_tools)
        deltas: list[Delta] = [] if parsed.reasoning is None else [ReasoningDelta(parsed.reasoning)]
        content = parsed.content or ""
        if content.startswith(self._said) and len(content) > len(self._said):
            deltas.append(ContentDelta(content[len(self._said) :]))
        for number, call in enumerate(parsed.tool_calls):
            deltas += [CallStarted(number, call.id, call.name), CallArguments(number, call.arguments)]
        return deltas

    def _may_mean_more(self) -> bool:
        """Whether the text so far could be thoughts, an object that is a call, or nothing yet."""
        start = self._text.lstrip()
        if self._looked_at:
            return False
        if not start or start.startswith(_THINK) or _THINK.startswith(start):
            return True
        return self._has_tools and start.startswith("{")
