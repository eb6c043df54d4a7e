"""Passing an answer on: whole, or as a stream while it arrives.

Bytes are passed on as they came where nothing has to be taken out of them or said in another dialect.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from agentlightning.dialects import DialectName
from agentlightning.dialects.failures import BackendStreamError, Failure, failure_in_stream
from agentlightning.dialects.sse import InvalidStream, ServerSentEvent, SseParser
from agentlightning.dialects.token_fields import is_unasked_usage_chunk, without_unasked
from agentlightning.errors import ProxyError
from agentlightning.llm_proxy.backends import BackendBroken
from agentlightning.llm_proxy.records import CallRecord
from agentlightning.llm_proxy.spans import DIALECTS
from agentlightning.llm_proxy.wire import answer_headers
from agentlightning.utils.deadline import within

if TYPE_CHECKING:
    from agentlightning.llm_proxy.backends import BackendResponse
    from agentlightning.llm_proxy.outgoing import OutgoingCall
    from agentlightning.llm_proxy.replay import RecordedAnswer

__all__ = ["StreamRelay", "usage_of", "visible_answer"]

LINGER_SECONDS: Final = 1.0
"""How long a backend may keep its stream open behind the last event, so that its connection can be used again."""
_LONGEST_NON_STREAM: Final = 1024**2
"""Bytes that are kept of an answer that is no stream, though one was asked for."""
_BLANK_LINES: Final = (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n")
_LONGEST_MARK: Final = 3
"""Bytes of a mark that may have come before the chunk that ends it."""
_DONE: Final = b"[DONE]"
_EVENT_STREAM: Final = "text/event-stream"
_LAST_RESPONSE_EVENTS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


def visible_answer(answer: Mapping[str, Any], outgoing: "OutgoingCall") -> bytes | None:
    """What the caller gets of an answer; None if that is the answer as it came."""
    if outgoing.translation is not None:
        return orjson.dumps(outgoing.translation.response(answer, outgoing.asked))
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
    """One stream on its way from a backend to a caller, an event at a time: half an event is never passed on."""

    def __init__(
        self,
        answer: "BackendResponse | RecordedAnswer",
        outgoing: "OutgoingCall",
        started_at: float,
        *,
        max_bytes: int,
    ) -> None:
        self.has_begun = False
        """Whether the caller has got anything."""
        self.is_over = False
        """Whether the backend has said all it had to say."""
        self.shown_events = 0
        """How many events the caller was given."""
        self.failure: Failure | None = None
        """What went wrong, if the last event says so."""
        self._answer = answer
        self._outgoing = outgoing
        self._started_at = started_at
        self._dialect: DialectName = outgoing.backend_dialect
        self._parser = SseParser()
        self._held = bytearray()  # the beginning of an event whose end has not come
        self._error: ProxyError | None = None
        self._received: list[bytes] = []
        self._size = 0
        self._max_bytes = max_bytes
        self._first_part_seconds: float | None = None
        self._finished_choices: set[int] = set()
        assembler = DIALECTS[self._dialect].assembler
        self._assembler = None if assembler is None else assembler()
        self._translated = None if outgoing.translation is None else outgoing.translation.stream(outgoing.asked)
        self._is_changed = self._translated is not None or outgoing.has_extras

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*answer_headers(self._answer.headers, content_type=_EVENT_STREAM), (b"cache-control", b"no-cache")]

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """What the caller gets, as it comes.

        Raises:
            BackendStreamError: The backend told of an error.
            InvalidStream: What it sends is no stream of its dialect.
            BackendBroken: It ended too early, or does not end.
        """
        kind = self._answer.headers.get("content-type", "")
        if not kind.lower().startswith(_EVENT_STREAM):
            self._received.append(await self._answer.read(_LONGEST_NON_STREAM))
            raise InvalidStream(f"The backend was asked for a stream and answered with '{kind or 'no content type'}'.")
        chunks = self._answer.chunks().__aiter__()
        while chunk := await self._next(chunks):
            part = self._passed(chunk)
            if part:
                yield part
            if self._error is not None:
                raise self._error
        part = self._ended()
        if part:
            yield part

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes:
        """What the backend sends next, b"" at its end; which behind the last event may be late, or abrupt."""
        try:
            chunk = await (within(LINGER_SECONDS, chunks.__anext__()) if self.is_over else chunks.__anext__())
        except StopAsyncIteration:
            return b""
        except (TimeoutError, BackendBroken):
            if self.is_over:
                return b""
            raise
        self._received.append(chunk)
        self._size += len(chunk)
        if self._size > self._max_bytes:
            raise BackendBroken(f"The backend answered with more than {self._max_bytes} bytes, which is the limit.")
        return chunk

    def _ended(self) -> bytes:
        """What the caller gets when the backend has sent all; an event without its blank line counts if it is whole."""
        rest = self._parser.close()
        held = bytes(self._held)
        part = b""
        if rest.strip():
            shown = self._told(SseParser().feed(rest + b"\n\n"))
            if isinstance(self._error, BackendStreamError):
                raise self._error
            if self._error is None:
                part = shown if self._is_changed else held + b"\n\n"
        choices = self._outgoing.asked.get("n")
        is_finished = len(self._finished_choices) >= (choices if choices and isinstance(choices, (int, float)) else 1)
        if not (self.is_over or is_finished):
            raise BackendBroken("The backend ended its stream before its answer was complete.")
        if self._translated is not None:
            part += self._encoded(self._translated.finish())
        self.is_over = True
        return part

    def _passed(self, chunk: bytes) -> bytes:
        """What a chunk becomes for the caller."""
        shown = self._told(self._parser.feed(chunk))
        return shown if self._is_changed or self._error is not None else self._whole(chunk)

    def _told(self, events: Sequence[ServerSentEvent]) -> bytes:
        """Take note of events and say what the caller gets for them, up to one that is an error.

        Where he gets them as they came, only what went before an error is said.
        """
        parts: list[bytes] = []
        for number, event in enumerate(events):
            if self.is_over:  # what follows is none of the answer
                break
            try:
                said = self._read(event)
                if self.failure is not None and (redacted := self._outgoing.redacted(event.data)) != event.data:
                    return self._failed_with_secret(parts, events[:number], ServerSentEvent(redacted, event.name))
                if self._is_changed:
                    parts.append(self._shown(event, said))
            except ProxyError as error:
                self._error = error
                return b"".join(parts) if self._is_changed else self._encoded(events[:number])
        if not self._is_changed:
            self.shown_events += len(events)
        return b"".join(parts)

    def _failed_with_secret(
        self, parts: list[bytes], before: Sequence[ServerSentEvent], last: ServerSentEvent
    ) -> bytes:
        """What the caller gets where the last event repeats a key of ours; it cannot be given as it came."""
        shown = b"".join(parts) if self._is_changed else self._encoded(before)
        self._is_changed = True
        return shown + self._shown(last, orjson.loads(last.data))

    def _whole(self, chunk: bytes) -> bytes:
        """The bytes up to the end of the last whole event; the others are held back."""
        held = self._held
        if not held and chunk.endswith(b"\n\n"):
            return chunk
        before = bytes(held[-_LONGEST_MARK:])
        seam = before + chunk
        end = max(place + len(mark) if (place := seam.rfind(mark)) >= 0 else 0 for mark in _BLANK_LINES)
        if end == 0:
            held += chunk
            return b""
        cut = end - len(before)
        whole = bytes(held) + chunk[:cut]
        held[:] = chunk[cut:]
        return whole

    def _read(self, event: ServerSentEvent) -> dict[str, Any] | None:
        """Take note of an event; None if it says nothing but that the stream is over."""
        data = event.data
        if data.strip() == _DONE:
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
        if kind == "response.failed":
            self.failure = failure_in_stream(self._dialect, self._outgoing.redacted(data))
        self._assemble(said)
        for choice in said.get("choices") or ():
            if isinstance(choice, dict) and choice.get("finish_reason"):
                self._finished_choices.add(choice.get("index") or 0)
        return said

    def _assemble(self, said: dict[str, Any]) -> None:
        try:
            if self._assembler is not None and self._assembler.add(said) and self._first_part_seconds is None:
                self._first_part_seconds = time.perf_counter() - self._started_at
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidStream(f"The backend's stream holds an event of a strange shape: {error!r}") from error

    def _shown(self, event: ServerSentEvent, said: dict[str, Any] | None) -> bytes:
        """An event as the caller gets it."""
        if self._translated is not None:
            shown = [] if said is None else self._translated.add(said)
            return self._encoded([*shown, *self._translated.finish()] if self.is_over else shown)
        if said is not None:
            if is_unasked_usage_chunk(said, self._outgoing.asked):
                return b""
            if without_unasked(self._outgoing.dialect, said, self._outgoing.asked):
                event = ServerSentEvent(orjson.dumps(said), event.name)
        return self._encoded([event])

    def _encoded(self, events: Sequence[ServerSentEvent]) -> bytes:
        self.shown_events += len(events)
        return b"".join([event.encoded() for event in events])

    def complete(self, record: CallRecord) -> None:
        """Write on the record what has come so far."""
        record.response = b"".join(self._received)
        record.first_part_seconds = self._first_part_seconds
        if self._assembler is not None and self._first_part_seconds is not None:
            record.answer = self._assembler.response()
            record.usage = usage_of(record.answer)
