"""The output of a model in no dialect: chat, responses and messages are read into this form and written from it.

A whole response is a `ModelOutput`. Of a stream, the backend's `StreamReader` calls the client's `StreamWriter` with
every piece as it comes. Finish reasons are in the words of chat. Reading JSON of another shape raises.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import orjson

from agentlightning.dialects.failures import read_json
from agentlightning.dialects.sse import ServerSentEvent
from agentlightning.utils.json_values import JsonMapping, JsonObject

TextKind = Literal["content", "refusal", "reasoning"]
REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
"""Where chat servers put the reasoning of a model; OpenAI's own has no field for it."""
_INVALID_ARGUMENTS: Final = "invalid_arguments"


@dataclass(frozen=True)
class TokenUsage:
    """How many tokens a call took."""

    prompt: int = 0
    """All of the prompt, cached or not."""
    completion: int = 0
    """All that was generated, reasoning included."""
    cached: int = 0
    cache_written: int = 0
    reasoning: int = 0


def read_openai_usage(usage: JsonMapping | None, prompt: str, completion: str) -> TokenUsage:
    """The usage of a chat or a response, which differ in how they call the prompt and the completion."""
    usage = usage or {}
    prompt_details = usage.get(f"{prompt}_tokens_details") or {}
    completion_details = usage.get(f"{completion}_tokens_details") or {}
    return TokenUsage(
        prompt=usage.get(f"{prompt}_tokens") or 0,
        completion=usage.get(f"{completion}_tokens") or 0,
        cached=prompt_details.get("cached_tokens") or 0,
        cache_written=prompt_details.get("cache_write_tokens") or 0,
        reasoning=completion_details.get("reasoning_tokens") or 0,
    )


def token_counts(usage: TokenUsage, prompt: str = "prompt", completion: str = "completion") -> JsonObject:
    """The usage without its details, for servers that know none."""
    total = usage.prompt + usage.completion
    return {f"{prompt}_tokens": usage.prompt, f"{completion}_tokens": usage.completion, "total_tokens": total}


def write_openai_usage(usage: TokenUsage, prompt: str, completion: str) -> JsonObject:
    return {
        **token_counts(usage, prompt, completion),
        f"{prompt}_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.cache_written},
        f"{completion}_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


@dataclass(frozen=True)
class OutputCall:
    """A call of a tool."""

    call_id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True)
class ModelOutput:
    """A whole response with one choice."""

    output_id: str
    model: str
    text: str
    finish_reason: str
    usage: TokenUsage
    refusal: str = ""
    reasoning: str = ""
    reasoning_field: str = REASONING_FIELDS[0]
    """The field of a chat that the reasoning comes from and goes back to."""
    calls: Sequence[OutputCall] = ()
    stop_text: str | None = None
    """The stop sequence that ended it, where the backend names it."""
    created: float | None = None


class StreamWriter(ABC):
    """Writes the events of one stream in the dialect of the client; `StreamReader` says when each may be called."""

    def __init__(self, request: JsonMapping) -> None:
        self.request = request
        self.events: list[ServerSentEvent] = []
        """Written and not sent yet."""

    def send(self, content: JsonObject) -> None:
        """Write an event, named after its type where it has one."""
        self.events.append(ServerSentEvent(orjson.dumps(content), content.get("type")))

    @abstractmethod
    def start(self, output_id: str, model: str, created: float) -> None:
        """Begin the output."""

    @abstractmethod
    def add_text(self, kind: TextKind, text: str, reasoning_field: str = REASONING_FIELDS[0]) -> None:
        """Write a piece of text."""

    @abstractmethod
    def open_call(self, number: int, call_id: str, name: str) -> None:
        """Begin the call of a tool."""

    @abstractmethod
    def add_arguments(self, number: int, arguments: str) -> None:
        """Write a piece of the arguments of a call, which is the last that was opened where a dialect needs that."""

    @abstractmethod
    def close(self, finish_reason: str, stop_text: str | None) -> None:
        """The content is complete."""

    @abstractmethod
    def end(self, usage: TokenUsage) -> None:
        """Write the last events."""


@dataclass
class StreamReader(ABC):
    """Reads the events of one stream; calls `start`, pieces, `close` and `end` of the writer in this order."""

    writer: StreamWriter
    usage: TokenUsage = field(default_factory=TokenUsage)
    _is_started: bool = False
    _is_closed: bool = False
    _is_ended: bool = False

    @abstractmethod
    def read(self, event: JsonMapping) -> None:
        """Take one event that reports no error."""

    def start(self, output_id: str | None, model: str | None, created: float | None = None) -> None:
        if not self._is_started:
            self._is_started = True
            model = model or self.writer.request.get("model")
            self.writer.start(output_id or "", model or "", created or time.time())

    def close(self, finish_reason: str, stop_text: str | None = None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.writer.close(finish_reason, stop_text)

    def end(self) -> None:
        """The stream has ended as it should."""
        if not self._is_ended:
            self._is_ended = True
            self.start(None, None)
            self.close("stop")
            self.writer.end(self.usage)


def arguments_object(text: str | None) -> JsonObject:
    """A tool's arguments as an object. A text that is none is kept below a name that no tool has for a parameter."""
    if not text or not text.strip():
        return {}
    arguments = read_json(text)
    return arguments if isinstance(arguments, dict) else {_INVALID_ARGUMENTS: text}


def arguments_text(arguments: object) -> str:
    """A tool's arguments as JSON; the inverse of `arguments_object`."""
    if isinstance(arguments, dict) and arguments.keys() == {_INVALID_ARGUMENTS}:
        return str(arguments[_INVALID_ARGUMENTS])
    return orjson.dumps({} if arguments is None else arguments).decode()
