"""The chat format of a model of transformers: its own template, and the usual ways to write a tool call.

Text that was decoded is not always encoded to the tokens it came from. So the codec remembers what was sampled after
which prompt, and puts those very tokens where the message stands in the next turn (see `remember`). That is exact as
long as the template writes the turns before unchanged; templates that rewrite them (leaving out earlier thoughts, say)
are rendered as they are, and the turn begins a new sequence.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.engine.codec import IncrementalParser, Message, ParsedMessage, ToolDefinition
from agentlightning.engine.hf_tool_calls import HfParser, parsed_text
from agentlightning.errors import EngineError, InvalidRequest

__all__ = ["HfChatCodec", "end_ids_of"]

REMEMBERED: Final = 20_000
"""Messages whose tokens are kept; the oldest are forgotten first."""
_Key = tuple[int, str]


class HfChatCodec:
    """Renders with a tokenizer's chat template; a `ChatCodec`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: frozenset[int],
        remembered: int = REMEMBERED,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self._template_options = dict(template_options or {})
        self._limit = remembered
        self._sampled: OrderedDict[_Key, tuple[int, ...]] = OrderedDict()
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The tokens of a conversation, with the sampled ones where they are remembered."""
        conversation = [_for_template(message) for message in messages]
        whole = self._text(conversation, tools, is_asking=add_generation_prompt)
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
            written = len(before) + _message_length(after[len(before) :], self._ends(), is_ended=is_ended)
        return [*token_ids, *self.encode(whole[written:])]

    def remember(self, prompt_ids: Sequence[int], token_ids: Sequence[int], message: Message) -> None:
        """Keep what was sampled after a prompt, for when the message comes back in the next turn."""
        if not token_ids:
            return
        self._sampled[_key(prompt_ids, message)] = tuple(token_ids)
        while len(self._sampled) > self._limit:
            self._sampled.popitem(last=False)

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolDefinition] | None = None) -> ParsedMessage:
        """The message that sampled tokens, end token included, stand for."""
        return parsed_text(self.decode(token_ids), has_tools=bool(tools))

    def stream(self, tools: Sequence[ToolDefinition] | None = None) -> IncrementalParser:
        """A parser for a message that is still being sampled."""
        return HfParser(self, has_tools=bool(tools))

    def encode(self, text: str) -> list[int]:
        """The tokens of text; the names of special tokens in it become these tokens."""
        if not text:
            return []
        return [int(number) for number in self.tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special tokens say nothing."""
        kept = [number for number in token_ids if number not in self.end_ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones by their name."""
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # ------------------------------------------------------------------ parts

    def _text(self, messages: list[Message], tools: Sequence[ToolDefinition] | None, *, is_asking: bool) -> str:
        if not self._has_template:
            return _plain_text(messages, is_asking=is_asking)
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

    def _ends(self) -> list[str]:
        return [self.token_text(number) for number in sorted(self.end_ids)]


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


def _key(prompt_ids: Sequence[int], message: Message) -> _Key:
    """A message after a prompt; the ids of tool calls tell apart what reads the same."""
    calls = [
        (call.get("id"), (call.get("function") or {}).get("name"), (call.get("function") or {}).get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    said = json.dumps([message.get("content") or "", calls], sort_keys=True, default=str)
    return hash(tuple(prompt_ids)), said


def _message_length(text: str, ends: Sequence[str], *, is_ended: bool) -> int:
    """How much of an assistant's text its sampled tokens stand for: with the end token, if that was sampled."""
    place, length = max(((text.rfind(end), len(end)) for end in ends if end), default=(-1, 0))
    if place < 0:
        return len(text)
    return place + length if is_ended else place


def _for_template(message: Message) -> Message:
    """Templates take the arguments of tool calls as objects, where OpenAI's dialect writes them as text."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": message.get("content") or ""}
    return {**message, "content": message.get("content") or "", "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"The tool call {call!r} has no function.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def _plain_text(messages: Sequence[Message], *, is_asking: bool) -> str:
    """For base models, which have no chat template: a name and a text, line by line."""
    lines = [f"{str(message.get('role')).capitalize()}: {message.get('content') or ''}\n" for message in messages]
    return "".join(lines) + ("Assistant:" if is_asking else "")
