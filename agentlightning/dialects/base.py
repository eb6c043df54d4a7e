"""A dialect: one API of models, as one object with everything in which it differs from the others.

`Dialect` has what most APIs share, in OpenAI's shape; each is a subclass in a file of its own, and an entry of the
registry in `agentlightning.dialects`. `TranslatedDialect` can besides be served by backends that speak another.

`Translation` serves clients of one dialect from backends of another. Requests go by way of chat, responses by way of
`dialects.output`. It is a function of JSON, without any network; what is not in the shape of its dialect, or cannot be
translated, ends as one of our errors.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol

import orjson
from typing_extensions import Self

from agentlightning.dialects.attributes import Attributes, Thing
from agentlightning.dialects.failures import (
    BackendStreamError,
    Failure,
    dumped,
    failure_in_stream,
    is_error_event,
    openai_error,
)
from agentlightning.dialects.output import ModelOutput, StreamReader, StreamWriter
from agentlightning.dialects.sse import InvalidStream, ServerSentEvent
from agentlightning.errors import ProxyError
from agentlightning.utils.json_values import JsonMapping, JsonObject


class Assembler(Protocol):
    """Puts the events of a stream together to the response that would have come without one."""

    def add(self, event: JsonMapping) -> bool:
        """Take one event; True if it brought a part of the answer."""
        ...

    def response(self) -> JsonMapping: ...


class Dialect(ABC):
    """One API of models."""

    name: str
    path: str
    """Below `/v1`."""
    span_name: str
    """Name of the span of a call that an SDK makes."""
    span_match: str
    """Pattern of such names; the name itself, where a subclass says nothing."""
    sdk: ClassVar[Literal["openai", "anthropic"]] = "openai"
    """The SDK whose clients speak it."""
    count_path: ClassVar[str | None] = None
    """Takes a whole request, whose tokens are counted and which is not made; below `/v1`."""
    client_header: ClassVar[bytes | None] = None
    """Sent by its clients alone, also where they only list models."""
    passed_headers: ClassVar[tuple[bytes, ...]] = (b"openai-beta",)
    """Of a caller's headers, those that a backend is sent."""
    is_below_deployment: ClassVar[bool] = True
    """Whether its address at Azure names the deployment."""

    content_fields: ClassVar[frozenset[str]]
    """Fields of a request that hold what the model reads."""
    limit_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the limit of tokens written, the newest first; none where nothing is written."""
    renamed_parameters: ClassVar[Mapping[str, str]] = {}
    """By their names in a chat: sampling parameters that have another here."""
    carries_tokens: ClassVar[bool] = False
    """Whether it has fields for token ids and log-probabilities."""
    last_events: ClassVar[frozenset[str]] = frozenset()
    """Types of events behind which a stream has none, in dialects without `[DONE]`."""
    failed_event: ClassVar[str | None] = None
    """Type of the last event of a stream whose answer failed."""

    def __init_subclass__(cls) -> None:
        if "span_name" in vars(cls) and "span_match" not in vars(cls):
            cls.span_match = cls.span_name.replace(".", r"\.")

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<dialect {self.name}>"

    def recorded_as(self, span_name: str) -> Self:
        """The dialect with another name for the spans of its calls."""
        renamed = copy.copy(self)
        renamed.span_name = span_name
        return renamed

    # ------------------------------------------------------------------ spans

    @abstractmethod
    def request_attributes(self, body: JsonMapping) -> Attributes:
        """A request as attributes of a span."""

    @abstractmethod
    def response_attributes(self, response: Thing) -> Attributes:
        """A whole response as attributes of a span: an object of the SDK, or JSON."""

    def assembler(self) -> Assembler | None:
        """Reads one stream; None where answers do not stream."""
        return None

    def usage_in(self, answer: JsonMapping) -> tuple[int, int] | None:
        """Prompt and completion tokens; None where the backend does not say."""
        usage = answer.get("usage")
        if not isinstance(usage, Mapping):
            return None
        read = usage.get("prompt_tokens", usage.get("input_tokens"))
        written = usage.get("completion_tokens", usage.get("output_tokens"))
        return (read if isinstance(read, int) else 0, written if isinstance(written, int) else 0)

    def has_token_ids(self, answer: JsonMapping) -> bool:
        """Whether an answer holds the token ids of prompt and response."""
        return bool(answer.get("prompt_token_ids") and answer.get("response_token_ids"))

    def ended_choices(self, event: JsonMapping) -> Iterable[int]:
        """Numbers of the choices that end with an event of a stream."""
        del event
        return ()

    def is_failed(self, event: JsonMapping) -> bool:
        """Whether an event of a stream is the last, of an answer that failed."""
        return self.failed_event is not None and event.get("type") == self.failed_event

    # ------------------------------------------------------------------ requests

    def sampling_parameters(self, sampling: JsonMapping) -> JsonObject:
        """The sampling parameters of a chat, as this API calls them; None removes a field of the caller's."""
        return {self.renamed_parameters.get(name, name): value for name, value in sampling.items()}

    def with_tokens(self, body: JsonMapping, *, ids: bool, logprobs: bool) -> JsonObject:
        """A copy of a request that asks for token ids and log-probabilities, where there are fields for them."""
        del ids, logprobs
        return dict(body)

    def with_usage(self, body: JsonMapping) -> JsonObject:
        """A copy of a request that asks for the usage at the end of its stream, where that must be asked for."""
        return dict(body)

    def without_extras(self, answer: JsonObject, request: JsonMapping) -> bool:
        """Remove from an answer or a chunk, in place, what the client's own request did not ask for.

        Returns:
            Whether anything was removed; if not, the bytes it came in can be passed on.
        """
        del answer, request
        return False

    def is_extra(self, event: JsonMapping, request: JsonMapping) -> bool:
        """Whether an event of a stream holds nothing that the client's own request asked for."""
        del event, request
        return False

    # ------------------------------------------------------------------ answers to clients

    def error_body(self, failure: Failure) -> bytes:
        """The body of an error answer."""
        return dumped({"error": openai_error(failure)})

    def error_event(self, failure: Failure, *, sequence_number: int = 0) -> bytes:
        """The event that reports a failure after a stream has begun; nothing may follow it.

        Args:
            sequence_number: How many events went before, for the dialects whose events are numbered.
        """
        del sequence_number
        return ServerSentEvent(self.error_body(failure)).encoded()

    def described_model(self, name: str) -> JsonObject:
        """A model, as its list has it."""
        return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}

    def model_list(self, names: Sequence[str]) -> JsonObject:
        """The answer to who asks for all models."""
        return {"object": "list", "data": [self.described_model(name) for name in names]}


class TranslatedDialect(Dialect):
    """A dialect whose clients can be served by backends of another, and the other way round.

    Requests go by way of chat, responses by way of `dialects.output`. What is not in the shape of the dialect raises
    KeyError, TypeError, ValueError, AttributeError or IndexError.
    """

    @abstractmethod
    def to_chat(self, body: JsonMapping) -> JsonObject:
        """A request as one of a chat."""

    @abstractmethod
    def from_chat(self, body: JsonMapping) -> JsonObject:
        """A request of a chat as one of this dialect."""

    @abstractmethod
    def read_output(self, body: JsonMapping) -> ModelOutput:
        """A whole response."""

    @abstractmethod
    def write_output(self, output: ModelOutput, request: JsonMapping) -> JsonObject:
        """A whole response; `request` is the client's, for the dialects whose responses repeat parts of it."""

    @abstractmethod
    def reader(self, writer: StreamWriter) -> StreamReader:
        """Reads the events of one stream of a backend for a client's writer."""

    @abstractmethod
    def writer(self, request: JsonMapping) -> StreamWriter:
        """Writes the events of one stream for a client, which answers its request."""


# ---------------------------------------------------------------------- translation


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
