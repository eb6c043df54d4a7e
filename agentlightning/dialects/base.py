"""A dialect: one API of models, as one object with everything in which it differs from the others.

`Dialect` has what most APIs share, in OpenAI's shape; each is a subclass in a file of its own, and an entry of the
registry in `agentlightning.dialects`. `TranslatedDialect` can besides be served by backends that speak another.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

from typing_extensions import Self

from agentlightning.dialects.attributes import Attributes, Thing
from agentlightning.dialects.failures import Failure, dumped, openai_error
from agentlightning.dialects.output import ModelOutput, StreamReader, StreamWriter
from agentlightning.dialects.sse import ServerSentEvent
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
