"""Passing an answer on: whole, or as a stream while it arrives.

Bytes are passed on as they came where nothing has to be taken out of them or said in another dialect.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from agentlightning.llm_proxy.backends.errors import BackendBroken
from agentlightning.llm_proxy.dialects.failures import BackendStreamError, failure_in_stream
from agentlightning.llm_proxy.dialects.names import DialectName
from agentlightning.llm_proxy.dialects.sse import InvalidStream, ServerSentEvent, SseParser
from agentlightning.llm_proxy.dialects.token_fields import is_unasked_usage_chunk, without_unasked
from agentlightning.llm_proxy.records import CallRecord
from agentlightning.llm_proxy.spans import DIALECTS
from agentlightning.llm_proxy.wire import answer_headers

if TYPE_CHECKING:
    from agentlightning.llm_proxy.backends import Answer
    from agentlightning.llm_proxy.outgoing import OutgoingCall
    from agentlightning.llm_proxy.replay import RecordedAnswer

__all__ = ["StreamRelay", "usage_of", "visible_answer"]

_DONE: Final = b"[DONE]"
_EVENT_STREAM: Final = "text/event-stream"
_LAST_RESPONSE_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


def visible_answer(answer: Mapping[str, Any], outgoing: "OutgoingCall") -> bytes | None:
    """What the caller gets of an answer; None if that is the answer as it came."""
    if outgoing.translation is not None:
        return orjson.dumps(outgoing.translation.response(answer))
    if not outgoing.has_extras:
        return None
    shown = _loosened(answer)
    return orjson.dumps(shown) if without_unasked(outgoing.dialect, shown, outgoing.asked) else None


def _loosened(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A copy from which fields can be taken without taking them from the record."""
    shown = dict(answer)
    if isinstance(shown.get("choices"), list):
        shown["choices"] = [dict(choice) if isinstance(choice, dict) else choice for choice in shown["choices"]]
    return shown


def usage_of(answer: Mapping[str, Any]) -> tuple[int, int] | None:
    """Tokens read and written."""
    usage = answer.get("usage")
    if not isinstance(usage, Mapping):
        return None
    read = usage.get("prompt_tokens", usage.get("input_tokens"))
    written = usage.get("completion_tokens", usage.get("output_tokens"))
    return (read if isinstance(read, int) else 0, written if isinstance(written, int) else 0)


class StreamRelay:
    """One stream on its way from a backend to a caller."""

    def __init__(self, answer: "Answer | RecordedAnswer", outgoing: "OutgoingCall", started_at: float) -> None:
        self.has_begun = False
        """Whether the caller has got anything."""
        self.is_over = False
        """Whether the backend has said all it had to say."""
        self._answer = answer
        self._outgoing = outgoing
        self._started_at = started_at
        self._dialect: DialectName = outgoing.backend_dialect
        self._parser = SseParser()
        self._received: list[bytes] = []
        self._first_part_seconds: float | None = None
        self._has_finish_reason = False
        assembler = DIALECTS[self._dialect].assembler
        self._assembler = None if assembler is None else assembler()
        self._translated = None if outgoing.translation is None else outgoing.translation.stream(outgoing.asked)

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*answer_headers(self._answer.headers, content_type=_EVENT_STREAM), (b"cache-control", b"no-cache")]

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """What the caller gets, as it comes.

        Raises:
            BackendStreamError: The backend told of an error.
            InvalidStream: What it sends is no stream of its dialect.
            BackendBroken: It ended too early.
        """
        kind = self._answer.headers.get("content-type", "")
        if not kind.startswith(_EVENT_STREAM):
            self._received.append(await self._answer.read(1024**2))
            raise InvalidStream(f"The backend was asked for a stream and answered with '{kind or 'no content type'}'.")
        async for chunk in self._answer.chunks():
            self._received.append(chunk)
            part = self._passed(chunk)
            if part:
                yield part
        rest = self._parser.close()
        if rest.strip():
            part = self._passed(b"\n\n")
            if part:
                yield part
        if not (self.is_over or self._has_finish_reason):
            raise BackendBroken("The backend ended its stream before its answer was complete.")
        if self._translated is not None and not self.is_over:
            self.is_over = True
            yield b"".join(event.encoded() for event in self._translated.finish())

    def _passed(self, chunk: bytes) -> bytes:
        """What a chunk becomes for the caller."""
        events = self._parser.feed(chunk)
        if self._translated is None and not self._outgoing.has_extras:
            for event in events:
                self._read(event)
            return chunk
        return b"".join([self._shown(event, self._read(event)) for event in events])

    def _read(self, event: ServerSentEvent) -> dict[str, Any] | None:
        """Take note of an event; None if it says nothing but that the stream is over."""
        data = event.data
        if data == _DONE:
            self.is_over = True
            return None
        try:
            said = orjson.loads(data)
        except ValueError:
            raise InvalidStream(f"The backend's stream holds what is not JSON: {data[:200]!r}") from None
        if not isinstance(said, dict):
            raise InvalidStream(f"The backend's stream holds an event that is no object: {data[:200]!r}")
        kind = said.get("type")
        if ("error" in said and said["error"] and kind in (None, "error")) or kind == "error":
            raise BackendStreamError(failure_in_stream(self._dialect, data))
        if kind == "message_stop" or kind in _LAST_RESPONSE_EVENTS:
            self.is_over = True
        if self._assembler is not None and self._assembler.add(said) and self._first_part_seconds is None:
            self._first_part_seconds = time.perf_counter() - self._started_at
        for choice in said.get("choices") or ():
            if isinstance(choice, dict) and choice.get("finish_reason"):
                self._has_finish_reason = True
        return said

    def _shown(self, event: ServerSentEvent, said: dict[str, Any] | None) -> bytes:
        """An event as the caller gets it."""
        if self._translated is not None:
            if said is None:
                return b"".join(shown.encoded() for shown in self._translated.finish())
            return b"".join(shown.encoded() for shown in self._translated.add(event))
        if said is None:
            return event.encoded()
        if is_unasked_usage_chunk(said, self._outgoing.asked):
            return b""
        if without_unasked(self._outgoing.dialect, said, self._outgoing.asked):
            return ServerSentEvent(orjson.dumps(said), event.name).encoded()
        return event.encoded()

    def complete(self, record: CallRecord) -> None:
        """Write on the record what has come so far."""
        record.response = b"".join(self._received)
        record.first_part_seconds = self._first_part_seconds
        if self._assembler is not None and self._first_part_seconds is not None:
            record.answer = self._assembler.response()
            record.usage = usage_of(record.answer)
