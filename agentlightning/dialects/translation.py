"""Translation for clients whose dialect the backend does not speak, and what dialects translate requests with.

Requests go by way of chat, responses by way of `dialects.output`. Everything here is a function of JSON, without any
network; what is not in the shape of its dialect, or cannot be translated, ends as one of our errors.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from agentlightning.dialects.base import TranslatedDialect
from agentlightning.dialects.failures import BackendStreamError, failure_in_stream, is_error_event
from agentlightning.dialects.output import StreamReader, StreamWriter
from agentlightning.dialects.sse import InvalidStream, ServerSentEvent
from agentlightning.errors import ProxyError
from agentlightning.utils.json_values import JsonObject

_SHAPE_ERRORS: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What reading JSON of another shape than the dialect's trips over."""
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


def untranslatable(field: str, *, client: str, backend: str, instead: str = "leave it out") -> UntranslatableRequest:
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


# ---------------------------------------------------------------------- both ways


class InvalidResponse(ProxyError):
    """A backend's response is not in the shape of its dialect."""

    http_status = 502


@dataclass(frozen=True)
class Translation:
    """Serves clients of one dialect from backends of another."""

    client: TranslatedDialect
    backend: TranslatedDialect

    def request(self, body: Mapping[str, object]) -> JsonObject:
        """A client's request as the backend's.

        Raises:
            UntranslatableRequest: It holds what the backend's dialect does not have, or is not in its own shape.
        """
        try:
            chat_body = self.client.to_chat(body)
            try:
                return self.backend.from_chat(chat_body)
            except UntranslatableRequest as error:
                if self.client.name == "chat":  # whose error names it already
                    raise
                raise untranslatable(error.field, client=self.client.name, backend=self.backend.name) from error
        except _SHAPE_ERRORS as error:
            problem = f"The request is not in the shape of the {self.client} dialect: {error!r}."
            raise UntranslatableRequest("body", problem) from error

    def response(self, body: Mapping[str, object], request: Mapping[str, object] | None = None) -> JsonObject:
        """A backend's whole response as the client's.

        Args:
            request: The client's own, for the dialects whose responses repeat parts of it.

        Raises:
            InvalidResponse: The response is not in the shape of the backend's dialect.
            BackendStreamError: It is the report of an error.
        """
        try:
            return self.client.write_output(self.backend.read_output(body), request or {})
        except _SHAPE_ERRORS as error:
            problem = f"The backend's answer is not in the shape of the {self.backend} dialect: {error!r}."
            raise InvalidResponse(problem) from error

    def stream(self, request: Mapping[str, object]) -> "StreamTranslation":
        """A translation of one stream, which answers the client's `request`."""
        writer = self.client.writer(request)
        return StreamTranslation(self.backend, self.backend.reader(writer), writer)


class StreamTranslation:
    """The events of one stream, from the backend's dialect into the client's, each as soon as it can be written."""

    def __init__(self, backend: TranslatedDialect, reader: StreamReader, writer: StreamWriter) -> None:
        self._backend = backend
        self._reader = reader
        self._writer = writer

    def add(self, event: JsonObject) -> list[ServerSentEvent]:
        """What the client is sent for an event of the backend.

        Raises:
            BackendStreamError: The event is the report of an error.
            InvalidStream: The event is not one of the backend's dialect.
        """
        if is_error_event(event) or self._backend.is_failed(event):
            raise BackendStreamError(failure_in_stream(orjson.dumps(event)))
        try:
            self._reader.read(event)
        except _SHAPE_ERRORS as error:
            raise InvalidStream(f"The backend sent an event that is not one of {self._backend}: {error!r}.") from error
        return self._sent()

    def finish(self) -> list[ServerSentEvent]:
        """What is still to be sent once the backend's stream has ended as it should; nothing the second time."""
        self._reader.end()
        return self._sent()

    def _sent(self) -> list[ServerSentEvent]:
        events, self._writer.events = self._writer.events, []
        return events
