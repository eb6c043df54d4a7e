"""Translation for clients whose dialect the backend does not speak: chat, responses and messages.

Requests go by way of chat, responses by way of `dialects.output`. Everything here is a function of JSON, without any
network; what is not in the shape of its dialect, or cannot be translated, ends as one of our errors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from agentlightning.dialects import DialectName, JsonObject, chat, messages, responses
from agentlightning.dialects.failures import BackendStreamError, failure_in_stream, is_error_event
from agentlightning.dialects.output import ModelOutput, StreamReader, StreamWriter
from agentlightning.dialects.sse import InvalidStream, ServerSentEvent
from agentlightning.errors import ProxyError
from agentlightning.llm_proxy.translation.base import UntranslatableRequest, untranslatable
from agentlightning.llm_proxy.translation.chat_messages import chat_from_messages, messages_from_chat
from agentlightning.llm_proxy.translation.chat_responses import chat_from_responses, responses_from_chat

__all__ = [
    "InvalidResponse",
    "StreamTranslation",
    "Translation",
    "UntranslatableRequest",
]

_SHAPE_ERRORS: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What reading JSON of another shape than the dialect's trips over."""


class InvalidResponse(ProxyError):
    """A backend's response is not in the shape of its dialect."""

    http_status = 502


@dataclass(frozen=True)
class _Dialect:
    """How a dialect is translated."""

    to_chat: Callable[[Mapping[str, Any]], JsonObject]
    from_chat: Callable[[Mapping[str, Any]], JsonObject]
    read: Callable[[Mapping[str, Any]], ModelOutput]
    write: Callable[[ModelOutput, Mapping[str, Any]], JsonObject]
    reader: Callable[[StreamWriter], StreamReader]
    writer: Callable[[Mapping[str, Any]], StreamWriter]


_DIALECTS: Final[Mapping[str, _Dialect]] = {
    "chat": _Dialect(dict, dict, chat.read_output, chat.write_output, chat.ChatReader, chat.ChatWriter),
    "responses": _Dialect(
        chat_from_responses,
        responses_from_chat,
        responses.read_output,
        responses.write_output,
        responses.ResponsesReader,
        responses.ResponsesWriter,
    ),
    "messages": _Dialect(
        chat_from_messages,
        messages_from_chat,
        messages.read_output,
        messages.write_output,
        messages.MessagesReader,
        messages.MessagesWriter,
    ),
}


@dataclass(frozen=True)
class Translation:
    """Serves clients of one dialect from backends of another."""

    client: DialectName
    backend: DialectName

    def request(self, body: Mapping[str, object]) -> JsonObject:
        """A client's request as the backend's.

        Raises:
            UntranslatableRequest: It holds what the backend's dialect does not have, or is not in its own shape.
        """
        try:
            chat_body = _DIALECTS[self.client].to_chat(body)
            try:
                return _DIALECTS[self.backend].from_chat(chat_body)
            except UntranslatableRequest as error:
                if self.client == "chat":
                    raise
                raise untranslatable(error.field, client=self.client, backend=self.backend) from error
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
            return _DIALECTS[self.client].write(_DIALECTS[self.backend].read(body), request or {})
        except _SHAPE_ERRORS as error:
            problem = f"The backend's answer is not in the shape of the {self.backend} dialect: {error!r}."
            raise InvalidResponse(problem) from error

    def stream(self, request: Mapping[str, object]) -> "StreamTranslation":
        """A translation of one stream, which answers the client's `request`."""
        writer = _DIALECTS[self.client].writer(request)
        return StreamTranslation(self.backend, _DIALECTS[self.backend].reader(writer), writer)


class StreamTranslation:
    """The events of one stream, from the backend's dialect into the client's, each as soon as it can be written."""

    def __init__(self, backend: DialectName, reader: StreamReader, writer: StreamWriter) -> None:
        self._backend = backend
        self._reader = reader
        self._writer = writer

    def add(self, event: JsonObject) -> list[ServerSentEvent]:
        """What the client is sent for an event of the backend.

        Raises:
            BackendStreamError: The event is the report of an error.
            InvalidStream: The event is not one of the backend's dialect.
        """
        if is_error_event(event) or event.get("type") == "response.failed":
            raise BackendStreamError(failure_in_stream(self._backend, orjson.dumps(event)))
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
