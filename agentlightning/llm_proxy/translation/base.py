"""What a translation of requests is made of: errors, fields that are taken one by one, and parts of chats."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from agentlightning.dialects import DialectName, JsonObject
from agentlightning.errors import ProxyError

OPENAI_HINTS: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
CHAT_HINTS: Final = OPENAI_HINTS | {"prediction", "return_token_ids", "return_tokens_as_token_ids", "seed"}
"""Without these an output is as good, or the proxy sees to them."""
NEUTRAL_CHAT: Final[Mapping[str, Any]] = {
    "n": 1,
    "stop": [],
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "functions": [],
}
"""Values that change nothing."""


class UntranslatableRequest(ProxyError):
    """A request holds something that the backend's dialect does not have; `field` names the place."""

    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


def untranslatable(
    field: str, *, client: DialectName, backend: DialectName, instead: str = "leave it out"
) -> UntranslatableRequest:
    """The error for a field, named with its place, and what a client does instead."""
    problem = f"'{field}' of a {client} request cannot be said to a backend that speaks {backend}"
    return UntranslatableRequest(field, f"{problem}; {instead}, or use a backend that speaks {client}.")


class RequestFields:
    """The fields of a request, each taken once; what is left at the end has no translation."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)

    def take(self, name: str) -> Any:
        """The value of a field; None if it is not set."""
        return self._left.pop(name, None)

    def copy(self, *names: str) -> JsonObject:
        """The fields that are set, under the same names."""
        return chosen({name: self.take(name) for name in names}, names)

    def take_chat_limit(self) -> Any:
        """How many tokens a chat may write; of its two names the newer comes first."""
        newer, older = self.take("max_completion_tokens"), self.take("max_tokens")
        return newer or older

    def refuse_rest(
        self,
        hints: Collection[str],
        neutral: Mapping[str, object],
        error: Callable[[str], UntranslatableRequest],
    ) -> None:
        """Raise for the first field that is left, unless it is a hint or has the value that is so anyway."""
        for name, value in self._left.items():
            if value is not None and name not in hints and not (name in neutral and value == neutral[name]):
                raise error(name)


def chosen(values: Mapping[str, Any], names: Iterable[str]) -> JsonObject:
    """Those of the named values that are set."""
    return {name: values[name] for name in names if values.get(name) is not None}


def text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def image_part(url: str) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": url}}


def numbered(convert: Callable[[Any, str], JsonObject], entries: Iterable[Any], place: str) -> list[JsonObject]:
    """Each entry of a list, converted with the name of its place."""
    return [convert(entry, f"{place}[{number}]") for number, entry in enumerate(entries)]


def parts_of(
    content: str | list[JsonObject], place: str, convert: Callable[[Any, str], JsonObject]
) -> list[JsonObject]:
    """The content of a message as parts of a chat."""
    return [text_part(content)] if isinstance(content, str) else numbered(convert, content, place)


def plain_content(parts: list[JsonObject]) -> str | list[JsonObject]:
    """Parts as the content of a chat: one text alone is the string it is, which every server understands."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts
