"""Between chat messages and tokens: what the server needs of a model's tokenizer and chat format.

The promise that training rests on: a message the codec parsed, sent back by the agent in the next turn, is rendered to
exactly the tokens that were sampled. `render(history + [parsed, ...])` begins with the earlier prompt followed by the
sampled tokens, so the turns of a conversation are one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
"""A message of OpenAI's chat dialect."""
ToolDefinition: TypeAlias = dict[str, Any]
"""A tool of OpenAI's chat dialect: {"type": "function", "function": {"name", "parameters", ...}}."""


@dataclass(frozen=True)
class ToolCall:
    """One call the model asked for."""

    id: str
    name: str
    arguments: str
    """JSON text, unless the model wrote something else."""


@dataclass(frozen=True)
class ParsedMessage:
    """What sampled tokens say."""

    content: str | None
    """None when there are only tool calls."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str | None = None

    def as_message(self) -> Message:
        """The assistant's message of OpenAI's chat dialect."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """A tool call begins; `index` counts the calls of the message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of the call with this index."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | CallStarted | CallArguments


def parsed_message(deltas: Sequence[Delta]) -> ParsedMessage:
    """The message that deltas add up to; thoughts are left out, for no client sends them back."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    started = [delta for delta in deltas if isinstance(delta, CallStarted)]
    arguments = dict.fromkeys((call.index for call in started), "")
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments[delta.index] += delta.text
    calls = [ToolCall(call.id, call.name, arguments[call.index]) for call in started]
    return ParsedMessage(None if calls and not content else content, calls)


class IncrementalParser(Protocol):
    """Parses one message token by token; all deltas together say what `ChatCodec.parse` says."""

    def add(self, token_id: int) -> list[Delta]:
        """What is certain after this token; nothing while it could still become something else."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back; called once, after the last token."""
        ...


class ChatCodec(Protocol):
    """One model's chat format."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] | None = None) -> list[int]:
        """The tokens of a conversation, up to where the assistant's next message begins."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolDefinition] | None = None) -> ParsedMessage:
        """The message that sampled tokens, end token included, stand for."""
        ...

    def stream(self, tools: Sequence[ToolDefinition] | None = None) -> IncrementalParser:
        """A parser for a message that is still being sampled."""
        ...

    def remember(self, prompt_ids: Sequence[int], token_ids: Sequence[int], message: Message) -> None:
        """Keep what was sampled after a prompt, where text does not always lead back to the tokens it came from.

        Args:
            message: What the client received, and will send back.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of plain text, without any chat format."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special tokens say nothing."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones by their name, for reports of log-probabilities."""
        ...
