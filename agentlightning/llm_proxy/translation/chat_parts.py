"""Parts of chat requests and answers that every translation reads or writes: chat stands between the others."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from agentlightning.dialects import JsonObject
from agentlightning.llm_proxy.translation.terms import UntranslatableRequest

__all__ = [
    "REASONING_FIELDS",
    "CallPieces",
    "DataUrl",
    "ToolCallDelta",
    "arguments_object",
    "arguments_text",
    "data_url",
    "first_choice",
    "function_call",
    "image_part",
    "plain_content",
    "reasoning_in",
    "text_part",
    "usage_counts",
]

REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
"""Where chat servers put what a model thinks; OpenAI's own has no field for it."""
_ARGUMENTS_THAT_ARE_NO_OBJECT: Final = "invalid_arguments"


def text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def image_part(url: str) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": url}}


def plain_content(parts: list[JsonObject]) -> str | list[JsonObject]:
    """Parts as content: one text alone is the string it is, which every server understands."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


@dataclass(frozen=True)
class DataUrl:
    """Bytes in base64 with their media type."""

    media_type: str
    data: str


def data_url(url: str, place: str) -> DataUrl | None:
    """The bytes within a `data:` address; None for one that leads elsewhere."""
    if not url.startswith("data:"):
        return None
    head, comma, data = url[len("data:") :].partition(",")
    media_type, _, encoding = head.partition(";")
    if not comma or not encoding.endswith("base64"):
        raise UntranslatableRequest(place, f"'{place}' is a data address that is not in base64; encode it so.")
    return DataUrl(media_type, data)


def arguments_object(text: str | None) -> JsonObject:
    """A tool's arguments as an object. A text that is none is kept below a name that no tool has for a parameter."""
    if not text or not text.strip():
        return {}
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {_ARGUMENTS_THAT_ARE_NO_OBJECT: text}
    return arguments if isinstance(arguments, dict) else {_ARGUMENTS_THAT_ARE_NO_OBJECT: text}


def arguments_text(arguments: Any) -> str:
    """A tool's arguments as JSON; the other way of `arguments_object`."""
    if isinstance(arguments, dict) and arguments.keys() == {_ARGUMENTS_THAT_ARE_NO_OBJECT}:
        return str(arguments[_ARGUMENTS_THAT_ARE_NO_OBJECT])
    return orjson.dumps({} if arguments is None else arguments).decode()


def function_call(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def reasoning_in(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """The field that holds what the model thought, and the thought; None without any."""
    for name in REASONING_FIELDS:
        text = message.get(name)
        if isinstance(text, str) and text:
            return name, text
    return None


def first_choice(answer: Mapping[str, Any]) -> JsonObject:
    """The one choice of an answer; translated requests ask for no more."""
    choice: JsonObject = answer["choices"][0]
    return choice


def usage_counts(usage: Mapping[str, Any] | None) -> "UsageCounts":
    """The counts of a chat's usage."""
    usage = usage or {}
    prompt_details, completion_details = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return UsageCounts(
        prompt=usage.get("prompt_tokens") or 0,
        completion=usage.get("completion_tokens") or 0,
        cached=(prompt_details or {}).get("cached_tokens") or 0,
        cache_written=(prompt_details or {}).get("cache_write_tokens") or 0,
        reasoning=(completion_details or {}).get("reasoning_tokens") or 0,
    )


@dataclass(frozen=True)
class UsageCounts:
    """How many tokens a call took."""

    prompt: int
    """All of the prompt, cached or not."""
    completion: int
    """All that was generated, reasoning included."""
    cached: int = 0
    cache_written: int = 0
    reasoning: int = 0

    def as_chat(self) -> JsonObject:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": self.cache_written},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(frozen=True)
class ToolCallDelta:
    """What a chunk adds to one of the calls of an answer."""

    number: int
    is_new: bool
    """Whether the call can be named now, for the first time."""
    call_id: str
    name: str
    arguments: str


@dataclass
class CallPieces:
    """The tool calls of a stream, whose chunks may leave out the number, the id, or bring the name late."""

    answer_id: str = ""
    """Names the calls of a server that does not."""
    _ids: dict[int, str] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _waiting: dict[int, str] = field(default_factory=dict)
    """Arguments that came before the name."""
    _last: int = -1

    def deltas(self, calls: Iterable[Mapping[str, Any]] | None) -> Iterator[ToolCallDelta]:
        """What can be said of the calls in a chunk."""
        for call in calls or ():
            function = call.get("function") or {}
            number = self._number(call, function)
            self._last = number
            self._ids[number] = self._ids.get(number) or call.get("id") or f"{self.answer_id}-call-{number}"
            arguments = self._waiting.pop(number, "") + (function.get("arguments") or "")
            is_new = number not in self._names
            if is_new and not function.get("name"):
                self._waiting[number] = arguments
                continue
            name = self._names.setdefault(number, function.get("name") or "")
            yield ToolCallDelta(number, is_new, self._ids[number], name, arguments)

    def _number(self, call: Mapping[str, Any], function: Mapping[str, Any]) -> int:
        number = call.get("index")
        if number is not None:
            return int(number)
        return self._last + 1 if function.get("name") or self._last < 0 else self._last
