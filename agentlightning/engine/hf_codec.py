"""The chat format of a model of transformers: its own template, and the usual ways to write a tool call.

Text that was decoded is not always encoded to the tokens it came from. So the codec remembers what was sampled after
which prompt, and puts those very tokens where the message stands in the next turn (see `remember`). That is exact as
long as the template writes the turns before unchanged; templates that rewrite them (leaving out earlier thoughts, say)
are rendered as they are, and the turn begins a new sequence.

What sampled text means:

    <think> … </think>                                          thoughts, before everything else
    <tool_call>{"name": …, "arguments": {…}}</tool_call>        Hermes, Qwen and many others
    {"name": …, "parameters": {…}}                              Llama 3, as the whole answer

Anything else is text.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import uuid4

from agentlightning.engine.codec import (
    CallArguments,
    CallStarted,
    ContentDelta,
    Delta,
    IncrementalDecoder,
    IncrementalParser,
    Message,
    ParsedMessage,
    ReasoningDelta,
    StopText,
    ToolCall,
    ToolDefinition,
)
from agentlightning.errors import EngineError, InvalidRequest
from agentlightning.utils.json_values import JsonMapping

_CALL: Final = "<tool_call>"
_CALLS: Final = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_THINK: Final = "<think>"
_THOUGHT: Final = "</think>"


class HfChatCodec:
    """Renders with a tokenizer's chat template; a `ChatCodec`."""

    def __init__(self, tokenizer: Any, *, end_ids: frozenset[int], template_options: JsonMapping | None = None) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self._template_options = dict(template_options or {})
        self._sampled: OrderedDict[tuple[int, str], tuple[int, ...]] = OrderedDict()
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] | None = None) -> list[int]:
        """The tokens of a conversation, with the sampled ones where they are remembered."""
        conversation = [_for_template(message) for message in messages]
        whole = self._text(conversation, tools, is_asking=True)
        token_ids: list[int] = []
        written = 0  # characters of `whole` that `token_ids` stand for
        for number, message in enumerate(messages):
            if message.get("role") != "assistant" or not self._sampled:
                continue
            before = self._text(conversation[:number], tools, is_asking=True)
            after = self._text(conversation[: number + 1], tools, is_asking=False)
            if not (len(before) >= written and after.startswith(before) and whole.startswith(after)):
                continue
            prompt = [*token_ids, *self.encode(before[written:])]
            sampled = self._sampled.get(_key(prompt, message))
            if sampled is None:
                continue
            is_ended = sampled[-1] in self.end_ids
            token_ids = [*prompt, *sampled]
            # The sampled tokens stand for the assistant's text: with the end token, if that was sampled.
            text = after[len(before) :]
            ends = [self.token_text(number) for number in sorted(self.end_ids)]
            place, length = max(((text.rfind(end), len(end)) for end in ends if end), default=(-1, 0))
            if place < 0:
                place, length = len(text), 0
            written = len(before) + place + (length if is_ended else 0)
        return [*token_ids, *self.encode(whole[written:])]

    def remember(self, prompt_ids: Sequence[int], token_ids: Sequence[int], message: Message) -> None:
        """Keep what was sampled after a prompt, for when the message comes back in the next turn."""
        if not token_ids:
            return
        self._sampled[_key(prompt_ids, message)] = tuple(token_ids)
        while len(self._sampled) > 20_000:
            self._sampled.popitem(last=False)

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolDefinition] | None = None) -> ParsedMessage:
        return parsed_text(self.decode(token_ids), has_tools=bool(tools))

    def stream(self, tools: Sequence[ToolDefinition] | None = None) -> IncrementalParser:
        return HfParser(self, has_tools=bool(tools))

    def encode(self, text: str) -> list[int]:
        """The tokens of text; the names of special tokens in it become these tokens."""
        if not text:
            return []
        return [int(number) for number in self.tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        kept = [number for number in token_ids if number not in self.end_ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _text(self, messages: list[Message], tools: Sequence[ToolDefinition] | None, *, is_asking: bool) -> str:
        if not self._has_template:  # a base model: a name and a text, line by line
            lines = [f"{str(one.get('role')).capitalize()}: {one.get('content') or ''}\n" for one in messages]
            return "".join(lines) + ("Assistant:" if is_asking else "")
        if not messages:
            return ""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=is_asking,
                    tokenize=False,
                    **self._template_options,
                )
            )
        except Exception as error:  # whatever the template raises, it is about these messages
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}") from error


def end_ids_of(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """The tokens that end a message, by what the model's files say; EngineError if they name none."""
    found: set[int] = set()
    for given in (getattr(generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update([given] if isinstance(given, int) else given or ())
    for name in ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"):
        number = tokenizer.convert_tokens_to_ids(name)
        if isinstance(number, int) and number != tokenizer.unk_token_id:
            found.add(number)
    if not found:
        raise EngineError("The tokenizer knows no token that ends a message.")
    return frozenset(found)


def _key(prompt_ids: Sequence[int], message: Message) -> tuple[int, str]:
    """A message after a prompt; the ids of tool calls tell apart what reads the same."""
    calls = [
        (call.get("id"), (call.get("function") or {}).get("name"), (call.get("function") or {}).get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    said = json.dumps([message.get("content") or "", calls], sort_keys=True, default=str)
    return hash(tuple(prompt_ids)), said


def _for_template(message: Message) -> Message:
    """Templates take the arguments of tool calls as objects, where OpenAI's API has them as text."""
    changed = {**message, "content": message.get("content") or ""}
    if not message.get("tool_calls"):
        return changed
    changed["tool_calls"] = calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequest(f"The tool call {call!r} has no function.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return changed


# ---------------------------------------------------------------------- what sampled text means


def parsed_text(text: str, *, has_tools: bool) -> ParsedMessage:
    """The message that a text stands for; tool calls are looked for only where there are tools."""
    reasoning = None
    if _THOUGHT in text:  # thoughts may have begun in the prompt, so the end of them is what counts
        thoughts, _, rest = text.partition(_THOUGHT)
        reasoning, text = thoughts.lstrip().removeprefix(_THINK).strip("\n"), rest.lstrip("\n")
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


def _call(text: str, parameter_name: str) -> ToolCall | None:
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(written, dict) or not isinstance(written.get("name"), str):
        return None
    arguments: object = written.get(parameter_name, written.get("arguments", written.get("parameters")))
    if arguments is None:
        return None
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{uuid4().hex[:24]}", written["name"], as_text)


class HfParser:
    """Parses one message token by token; text that may be a tool call or a thought is held back until it is known."""

    def __init__(self, codec: HfChatCodec, *, has_tools: bool) -> None:
        self._codec = codec
        self._has_tools = has_tools
        self._decoder = IncrementalDecoder(codec)
        self._stop = StopText([_CALL] if has_tools else [])
        self._held = ""
        """Text that may be thoughts or an object that is a call; empty once it is known."""
        self._is_known = False
        self._sent = ""

    def add(self, token_id: int) -> list[Delta]:
        self._held += self._decoder.add(token_id)
        start = self._held.lstrip()
        if not self._is_known:
            may_be_thoughts = start.startswith(_THINK) or _THINK.startswith(start)
            if may_be_thoughts or (self._has_tools and start.startswith("{")):
                return []
            self._is_known = True
        certain, self._held = self._stop.add(self._held), ""
        self._sent += certain
        return [ContentDelta(certain)] if certain else []

    def finish(self) -> list[Delta]:
        """What was held back, read as a whole."""
        parsed = self._codec.parse(self._decoder.token_ids, [{}] if self._has_tools else None)
        deltas: list[Delta] = [] if parsed.reasoning is None else [ReasoningDelta(parsed.reasoning)]
        content = parsed.content or ""
        if content.startswith(self._sent) and len(content) > len(self._sent):
            deltas.append(ContentDelta(content[len(self._sent) :]))
        for number, call in enumerate(parsed.tool_calls):
            deltas += [CallStarted(number, call.id, call.name), CallArguments(number, call.arguments)]
        return deltas
