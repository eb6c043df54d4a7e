"""Between chat messages and tokens: what the server needs of a model's tokenizer and chat format.

The promise that training rests on: a message the codec parsed, sent back by the agent in the next turn, is rendered to
exactly the tokens that were sampled. `render(history + [parsed, ...])` begins with the earlier prompt followed by the
sampled tokens, so the turns of a conversation are one sequence.

Text is decoded while it is sampled, token by token, and cut where a stop string begins. This runs in the thread of the
engine, so that a stop string ends the sampling with the token that completes it. The token ids keep all that was
sampled; only the text is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from agentlightning.dialects.chat import function_call

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
            message["tool_calls"] = [function_call(call.id, call.name, call.arguments) for call in self.tool_calls]
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


# ---------------------------------------------------------------------- texts that end a generation


class IncrementalDecoder:
    """Decodes token by token; a character that several tokens make up comes whole."""

    def __init__(self, codec: ChatCodec) -> None:
        self.token_ids: list[int] = []
        self._codec = codec
        self._decoded = 0
        self._context = 0
        """The tokens from here to `_decoded` are decoded again with what follows, as some tokenizers need."""

    def add(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        text = self._rest()
        if not text or text.endswith("\ufffd"):  # what the bytes of an incomplete character decode to
            return ""
        self._context, self._decoded = self._decoded, len(self.token_ids)
        return text

    def finish(self) -> str:
        """What is left, incomplete characters included."""
        text, self._decoded = self._rest(), len(self.token_ids)
        return text

    def _rest(self) -> str:
        before = self._codec.decode(self.token_ids[self._context : self._decoded])
        return self._codec.decode(self.token_ids[self._context :])[len(before) :]


class TextParser:
    """An `IncrementalParser` for text without a chat format."""

    def __init__(self, codec: ChatCodec) -> None:
        self._decoder = IncrementalDecoder(codec)

    def add(self, token_id: int) -> list[Delta]:
        text = self._decoder.add(token_id)
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        text = self._decoder.finish()
        return [ContentDelta(text)] if text else []


class StopText:
    """Text that arrives in pieces, up to the first stop string; what could be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_hit = False
        self._stops = stops
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that is certain now."""
        if self.is_hit:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_hit, self._held = True, ""
            return text[: min(places)]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back, when no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that begins a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class StoppedParser:
    """A parser whose text ends before the first stop string."""

    def __init__(self, parser: IncrementalParser, stops: Sequence[str] = ()) -> None:
        self._parser = parser
        self._stop = StopText(stops)

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_hit

    def add(self, token_id: int) -> list[Delta]:
        return self._cut(self._parser.add(token_id))

    def finish(self) -> list[Delta]:
        deltas = [] if self.is_stopped else self._cut(self._parser.finish())
        if not self.is_stopped and (rest := self._stop.finish()):
            deltas.append(ContentDelta(rest))
        return deltas

    def _cut(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if self._stop.is_hit:
                break
            if not isinstance(delta, ContentDelta):
                kept.append(delta)
            elif text := self._stop.add(delta.text):
                kept.append(ContentDelta(text))
        return kept
