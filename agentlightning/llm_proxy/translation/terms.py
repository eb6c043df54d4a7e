"""The terms of translation: what a translation can do, and how it says that it cannot.

A pair of dialects is a file that gives three functions; `Translation` puts them together and sees to it that a request
or an answer that is not in its dialect's shape ends as one of our errors, whatever it tripped over.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from agentlightning.dialects import DialectName, JsonObject
from agentlightning.dialects.failures import BackendStreamError, failure_in_stream
from agentlightning.dialects.sse import InvalidStream, ServerSentEvent
from agentlightning.errors import ProxyError

__all__ = [
    "DONE",
    "EventTranslation",
    "InvalidAnswer",
    "StreamTranslation",
    "Translation",
    "UntranslatableDialect",
    "UntranslatableRequest",
    "data_event",
    "is_error",
    "named_event",
    "refuse_others",
    "unsayable",
]

DONE: Final = ServerSentEvent(b"[DONE]")
"""The last event of a chat's stream."""

_SHAPE_ERRORS: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What reading JSON of another shape than the dialect's trips over."""


class UntranslatableDialect(ProxyError):
    """No agent of this dialect can be served by a backend of that one."""

    http_status = 400


class UntranslatableRequest(ProxyError):
    """A request says something that the backend's dialect cannot; `field` names where."""

    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[1])


class InvalidAnswer(ProxyError):
    """A backend's answer is not in the shape of its dialect."""

    http_status = 502


class StreamTranslation(ABC):
    """The events of one stream, from the backend's dialect into the client's, each as soon as it can be said."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the backend has said that it is done; a stream that ends before was cut."""

    @abstractmethod
    def add(self, event: ServerSentEvent) -> list[ServerSentEvent]:
        """What the client is to be sent for an event of the backend.

        Raises:
            BackendStreamError: The event is the report of an error.
            InvalidStream: The event is not one of the backend's dialect.
        """

    @abstractmethod
    def finish(self) -> list[ServerSentEvent]:
        """What is still to be sent once the backend's stream has ended as it should; nothing the second time."""


class EventTranslation(StreamTranslation):
    """A translation that reads each event as JSON; a pair of dialects says what it makes of it."""

    def __init__(self, backend: DialectName) -> None:
        self._backend = backend
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def add(self, event: ServerSentEvent) -> list[ServerSentEvent]:
        if event.data.strip() == DONE.data:
            self._is_complete = True
            return self.finish()
        try:
            content = orjson.loads(event.data)
            if is_error(self._backend, content):
                raise BackendStreamError(failure_in_stream(self._backend, event.data))
            return list(self._translated(content))
        except _SHAPE_ERRORS as error:
            raise InvalidStream(f"The backend sent an event that is not one of {self._backend}: {error!r}.") from error

    @abstractmethod
    def _translated(self, event: JsonObject) -> Iterable[ServerSentEvent]:
        """What to send for an event that is not an error."""


def is_error(dialect: DialectName, event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream reports an error."""
    if dialect in ("messages", "responses"):
        return event.get("type") in ("error", "response.failed")
    return bool(event.get("error")) or event.get("object") == "error"


@dataclass(frozen=True)
class Translation:
    """Serves clients of one dialect from backends of another."""

    client: DialectName
    backend: DialectName
    to_request: Callable[[Mapping[str, Any]], JsonObject]
    to_response: Callable[[Mapping[str, Any], Mapping[str, Any]], JsonObject]
    """From the backend's answer and the client's request, parts of which some dialects repeat."""
    to_stream: Callable[[Mapping[str, Any]], StreamTranslation]

    def request(self, body: Mapping[str, Any]) -> JsonObject:
        """A client's request as the backend's.

        Raises:
            UntranslatableRequest: It says something that the backend's dialect cannot, or is not in its own shape.
        """
        try:
            return self.to_request(body)
        except _SHAPE_ERRORS as error:
            told = f"The request is not in the shape of the {self.client} dialect: {error!r}."
            raise UntranslatableRequest("body", told) from error

    def response(self, body: Mapping[str, Any], request: Mapping[str, Any] | None = None) -> JsonObject:
        """A backend's whole answer as the client's.

        Args:
            request: The client's own, for the dialects whose answers repeat parts of it.

        Raises:
            InvalidAnswer: The answer is not in the shape of the backend's dialect.
            BackendStreamError: It is the report of an error.
        """
        try:
            return self.to_response(body, request or {})
        except _SHAPE_ERRORS as error:
            told = f"The backend's answer is not in the shape of the {self.backend} dialect: {error!r}."
            raise InvalidAnswer(told) from error

    def stream(self, request: Mapping[str, Any]) -> StreamTranslation:
        """A translation of one stream, which answers the client's `request`."""
        return self.to_stream(request)


def refuse_others(body: Mapping[str, Any], known: Iterable[str], *, client: DialectName, backend: DialectName) -> None:
    """Raise for the first field of a request that is set and not among those a translation knows."""
    for name, value in body.items():
        if value is not None and name not in known:
            raise unsayable(name, client=client, backend=backend)


def unsayable(
    field: str, *, client: DialectName, backend: DialectName, instead: str = "leave it out"
) -> UntranslatableRequest:
    """The error for a field, named with its place, and what a client does instead."""
    told = f"'{field}' of a {client} request cannot be said to a backend that speaks {backend}"
    return UntranslatableRequest(field, f"{told}; {instead}, or use a backend that speaks {client}.")


def data_event(content: Mapping[str, Any]) -> ServerSentEvent:
    """An event without a name, as in chat."""
    return ServerSentEvent(orjson.dumps(content))


def named_event(content: Mapping[str, Any]) -> ServerSentEvent:
    """An event named after its type, as in messages and responses."""
    return ServerSentEvent(orjson.dumps(content), content["type"])
