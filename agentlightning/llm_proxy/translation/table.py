"""Which dialects a backend can serve, and how: translations between chat, responses and messages.

Chat stands in the middle: what has no translation of its own goes through it. A client that speaks the backend's own
dialect is served without any change.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from agentlightning.dialects import DialectName, JsonObject
from agentlightning.dialects.failures import BackendStreamError, failure_in_stream
from agentlightning.dialects.sse import InvalidStream, ServerSentEvent
from agentlightning.llm_proxy.translation.chat_on_messages import CHAT_ON_MESSAGES
from agentlightning.llm_proxy.translation.chat_on_responses import CHAT_ON_RESPONSES
from agentlightning.llm_proxy.translation.messages_on_chat import MESSAGES_ON_CHAT
from agentlightning.llm_proxy.translation.responses_on_chat import RESPONSES_ON_CHAT
from agentlightning.llm_proxy.translation.terms import (
    DONE,
    InvalidAnswer,
    StreamTranslation,
    Translation,
    UntranslatableDialect,
    UntranslatableRequest,
    is_error,
    unsayable,
)

__all__ = [
    "BackendStreamError",
    "InvalidAnswer",
    "StreamTranslation",
    "Translation",
    "UntranslatableDialect",
    "UntranslatableRequest",
    "translation",
]

_PAIRS: Final[Mapping[tuple[DialectName, DialectName], Translation]] = {
    (pair.client, pair.backend): pair
    for pair in (MESSAGES_ON_CHAT, CHAT_ON_MESSAGES, RESPONSES_ON_CHAT, CHAT_ON_RESPONSES)
}
_SPEAKERS: Final[tuple[DialectName, ...]] = ("chat", "responses", "messages")
_LAST_EVENTS: Final = ("message_stop", "response.completed", "response.incomplete", "response.failed")
_OPENAI_MARKS: Final = (b'"finish_reason"', b'"error"')
_MARKS: Final[Mapping[DialectName, tuple[bytes, ...]]] = {
    "chat": _OPENAI_MARKS,
    "completions": _OPENAI_MARKS,
    "embeddings": _OPENAI_MARKS,
    "messages": (b'"message_stop"', b'"error"'),
    "responses": (b'"response.completed"', b'"response.incomplete"', b'"response.failed"', b'"error"'),
}
"""What stands in the events that say that a stream is done or has failed."""


def translation(client: DialectName, backend: DialectName) -> Translation:
    """How a client of one dialect is served by a backend of another.

    Raises:
        UntranslatableDialect: The backend cannot serve it.
    """
    if client == backend:
        return _unchanged(client)
    pair = _PAIRS.get((client, backend))
    if pair is not None:
        return pair
    if client in _SPEAKERS and backend in _SPEAKERS:
        return _composed(_PAIRS[client, "chat"], _PAIRS["chat", backend])
    served = ", ".join(_SPEAKERS if backend in _SPEAKERS else (backend,))
    raise UntranslatableDialect(
        f"A {client} call cannot be served by a backend that speaks {backend}, which can serve: {served}."
    )


# ---------------------------------------------------------------------- by way of chat


def _composed(outer: Translation, inner: Translation) -> Translation:
    """From the client into chat and from chat to the backend, and back."""

    def to_request(body: Mapping[str, Any]) -> JsonObject:
        chat = outer.request(body)
        try:
            return inner.request(chat)
        except UntranslatableRequest as error:
            raise unsayable(error.field, client=outer.client, backend=inner.backend) from error

    def to_response(body: Mapping[str, Any], request: Mapping[str, Any]) -> JsonObject:
        return outer.response(inner.response(body), request)

    def to_stream(request: Mapping[str, Any]) -> StreamTranslation:
        return _ComposedStream(outer.stream(request), inner, outer.request(request))

    return Translation(outer.client, inner.backend, to_request, to_response, to_stream)


class _ComposedStream(StreamTranslation):
    """The events of the backend as those of a chat, and these as the client's."""

    def __init__(self, outer: StreamTranslation, inner: Translation, chat_request: Mapping[str, Any]) -> None:
        self._outer = outer
        self._inner = inner.stream(chat_request)

    @property
    def is_complete(self) -> bool:
        return self._inner.is_complete

    def add(self, event: ServerSentEvent) -> list[ServerSentEvent]:
        return self._told(self._inner.add(event))

    def finish(self) -> list[ServerSentEvent]:
        return [*self._told(self._inner.finish()), *self._outer.finish()]

    def _told(self, events: Iterable[ServerSentEvent]) -> list[ServerSentEvent]:
        return [told for event in events for told in self._outer.add(event)]


# ---------------------------------------------------------------------- the same dialect


def _unchanged(dialect: DialectName) -> Translation:
    def to_stream(request: Mapping[str, Any]) -> StreamTranslation:
        return _UnchangedStream(dialect, request)

    return Translation(dialect, dialect, dict, lambda body, _: dict(body), to_stream)


class _UnchangedStream(StreamTranslation):
    """Passes every event on, and looks into those alone that may say that the backend is done or has failed."""

    def __init__(self, dialect: DialectName, request: Mapping[str, Any]) -> None:
        self._dialect = dialect
        self._expected = request.get("n") or 1
        self._finished: set[int] = set()
        self._is_done = False

    @property
    def is_complete(self) -> bool:
        return self._is_done or len(self._finished) >= self._expected

    def add(self, event: ServerSentEvent) -> list[ServerSentEvent]:
        data = event.data
        if data.strip() == DONE.data:
            self._is_done = True
        elif any(mark in data for mark in _MARKS[self._dialect]):
            self._look_into(data)
        return [event]

    def finish(self) -> list[ServerSentEvent]:
        return []

    def _look_into(self, data: bytes) -> None:
        try:
            content = orjson.loads(data)
            kind = content.get("type")
            if kind != "response.failed" and is_error(self._dialect, content):
                raise BackendStreamError(failure_in_stream(self._dialect, data))
            self._is_done = self._is_done or kind in _LAST_EVENTS
            choices = content.get("choices") or ()
            self._finished |= {choice.get("index") or 0 for choice in choices if choice.get("finish_reason")}
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidStream(f"The backend sent an event that is not one of {self._dialect}: {error!r}.") from error
