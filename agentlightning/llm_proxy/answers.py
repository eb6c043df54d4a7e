"""Answers on their way to the caller: whole ones, errors, and streams.

A stream is passed on while it arrives, an event at a time: half an event is never passed on. Bytes are passed on as
they came where nothing has to be taken out of them or translated.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import orjson

from agentlightning.asgi.bodies import check_values
from agentlightning.asgi.response import Header
from agentlightning.dialects.base import UntranslatableRequest
from agentlightning.dialects.failures import BackendStreamError, Failure, failure_in_stream, is_error_event, read_json
from agentlightning.dialects.sse import InvalidStream, ServerSentEvent, SseParser
from agentlightning.errors import AgentLightningError, PayloadTooLarge, ProxyError, StoreUnavailable
from agentlightning.llm_proxy.attribution import Refused
from agentlightning.llm_proxy.backends import BackendBroken, BackendError, BackendResponse, UnknownModel
from agentlightning.llm_proxy.recorder import CallRecord
from agentlightning.llm_proxy.replay import RecordedResponse
from agentlightning.utils.deadline import within

if TYPE_CHECKING:
    from agentlightning.llm_proxy.proxied_call import ProxiedCall

MOST_ANSWER_VALUES: Final = 1_000_000
"""Of JSON in one answer."""
SERVER_ERROR: Final = 500
FIRST_ERROR: Final = 400
_PASSED: Final = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "openai-model", "x-should-retry")
PIECE_BYTES: Final = 16 * 1024
"""Of a stream, read at a time."""
LINGER_SECONDS: Final = 1.0
"""How long a backend may keep its stream open behind the last event, so that its connection can be used again."""


def read_answer(body: bytes) -> dict[str, object]:
    """A backend's whole answer; ProxyError for what is none."""
    try:
        check_values(body, MOST_ANSWER_VALUES)
    except PayloadTooLarge:
        raise ProxyError(f"The backend answered with more than {MOST_ANSWER_VALUES} values.") from None
    answer = read_json(body)
    if not isinstance(answer, dict):
        raise ProxyError(f"The backend answered what is not a JSON object: {body[:200]!r}")
    return answer


def response_headers(headers: Mapping[str, str]) -> list[Header]:
    """Of a backend's headers, those that mean something to the caller."""
    return [
        (name.encode(), value.encode("utf-8", "surrogateescape"))  # what came from a library may be any text
        for name, value in headers.items()
        if name in _PASSED or name.startswith(("x-ratelimit-", "anthropic-ratelimit-", "openai-processing-"))
    ]


def failure_from(error: Refused | AgentLightningError) -> Failure:
    """What the caller gets for an error on the way to a backend."""
    if isinstance(error, Refused):
        return error.failure
    if isinstance(error, StoreUnavailable):
        return Failure(503, f"The proxy cannot reach its store: {error}", None)
    status = error.http_status if error.http_status != SERVER_ERROR else 502
    if isinstance(error, UnknownModel):
        return Failure(status, str(error), None, "model_not_found", "model")
    if isinstance(error, BackendError):
        return Failure(status, str(error), None, retry_after=error.retry_after_seconds)
    return Failure(status, str(error), None, param=error.field if isinstance(error, UntranslatableRequest) else None)


# ---------------------------------------------------------------------- streams


class StreamRelay:
    """One stream on its way from a backend to a caller."""

    def __init__(
        self,
        response: BackendResponse | RecordedResponse,
        call: "ProxiedCall",
        started_at: float,
        *,
        max_bytes: int,
    ) -> None:
        self.has_begun = False
        """Whether the caller has got anything."""
        self.is_over = False
        """Whether the backend has sent its last event."""
        self.shown_events = 0
        """How many events the caller got."""
        self.failure: Failure | None = None
        """What the last event reports, if that is a failure."""
        self._response = response
        self._call = call
        self._started_at = started_at
        self._parser = SseParser()
        self._held = bytearray()  # the beginning of an event whose end has not come
        self._error: ProxyError | None = None
        self._received: list[bytes] = []
        self._rest = b""
        self._size = 0
        self._max_bytes = max_bytes
        self._first_part_seconds: float | None = None
        self._finished_choices: set[int] = set()
        self._assembler = call.backend_dialect.assembler()
        self._translated = None if call.translation is None else call.translation.stream(call.requested)
        self._is_changed = self._translated is not None or call.has_extras

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """What the caller gets, as it comes.

        Raises:
            BackendStreamError: The backend reported an error.
            InvalidStream: What it sends is no stream of its dialect.
            BackendBroken: It ended too early, or does not end.
        """
        kind = self._response.headers.get("content-type", "")
        if not kind.lower().startswith("text/event-stream"):
            # A response that should be a stream and is none is kept up to 1 MiB.
            self._received.append(await self._response.read(1024**2))
            raise InvalidStream(f"The backend was asked for a stream and answered with '{kind or 'no content type'}'.")
        chunks = self._response.chunks().__aiter__()
        while chunk := await self._next(chunks):
            shown = self._take(self._parser.feed(chunk))
            part = shown if self._is_changed or self._error is not None else self._whole_events(chunk)
            if part:
                yield part
            if self._error is not None:
                raise self._error
        part = self._end()
        if part:
            yield part

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes:
        """The next piece, b"" at the end; which behind the last event may be late, or abrupt."""
        if self._rest:
            await asyncio.sleep(0)  # between the pieces of a large chunk other calls have their turn
            return self._piece_of(self._rest)
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
        return self._piece_of(chunk)

    def _piece_of(self, chunk: bytes) -> bytes:
        self._rest = chunk[PIECE_BYTES:]
        return chunk[:PIECE_BYTES]

    def _end(self) -> bytes:
        """What the caller gets when the backend has sent all; a last event may lack its blank line."""
        rest = self._parser.close()
        part = b""
        if rest.strip():
            shown = self._take(SseParser().feed(rest + b"\n\n"))
            if isinstance(self._error, BackendStreamError):
                raise self._error
            if self._error is None:
                part = shown if self._is_changed else bytes(self._held) + b"\n\n"
        choices = self._call.requested.get("n")
        is_finished = len(self._finished_choices) >= (choices if choices and isinstance(choices, (int, float)) else 1)
        if not (self.is_over or is_finished):
            raise BackendBroken("The backend ended its stream before its answer was complete.")
        if self._translated is not None:
            part += self._encoded(self._translated.finish())
        self.is_over = True
        return part

    def _take(self, events: Sequence[ServerSentEvent]) -> bytes:
        """Read events and return what the caller gets for them, up to one that is an error.

        Where the caller gets bytes as they came, only what went before an error is returned.
        """
        parts: list[bytes] = []
        for number, event in enumerate(events):
            if self.is_over:  # what follows is no part of the answer
                break
            try:
                content = self._read(event)
                if self.failure is not None and (redacted := self._call.redacted(event.data)) != event.data:
                    # The last event repeats a key of ours, so nothing of this chunk can be passed on as it came.
                    shown = b"".join(parts) if self._is_changed else self._encoded(events[:number])
                    self._is_changed = True
                    return shown + self._shown(ServerSentEvent(redacted, event.name), orjson.loads(redacted))
                if self._is_changed:
                    parts.append(self._shown(event, content))
            except ProxyError as error:
                self._error = error
                return b"".join(parts) if self._is_changed else self._encoded(events[:number])
        if not self._is_changed:
            self.shown_events += len(events)
        return b"".join(parts)

    def _whole_events(self, chunk: bytes) -> bytes:
        """The bytes up to the end of the last whole event; the others are held back."""
        held = self._held
        if not held and chunk.endswith(b"\n\n"):
            return chunk
        # Bytes of a blank line that may have come before the chunk that ends it.
        before = bytes(held[-3:])
        seam = before + chunk
        end = max(
            place + len(mark) if (place := seam.rfind(mark)) >= 0 else 0
            for mark in (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n")
        )
        if end == 0:
            held += chunk
            return b""
        cut = end - len(before)
        whole = bytes(held) + chunk[:cut]
        held[:] = chunk[cut:]
        return whole

    def _read(self, event: ServerSentEvent) -> dict[str, object] | None:
        """The content of an event; None if it only ends the stream."""
        data, dialect = event.data, self._call.backend_dialect
        if data.strip() == b"[DONE]":
            self.is_over = True
            return None
        try:
            content = orjson.loads(data)
        except ValueError:
            raise InvalidStream(f"The backend's stream holds what is not JSON: {data[:200]!r}") from None
        if not isinstance(content, dict):
            raise InvalidStream(f"The backend's stream holds an event that is no object: {data[:200]!r}")
        if is_error_event(content):
            raise BackendStreamError(failure_in_stream(data))
        if content.get("type") in dialect.last_events:
            self.is_over = True
        if dialect.is_failed(content):
            self.failure = failure_in_stream(self._call.redacted(data))
        try:
            if self._assembler is not None and self._assembler.add(content) and self._first_part_seconds is None:
                self._first_part_seconds = time.perf_counter() - self._started_at
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidStream(f"The backend's stream holds an event of a strange shape: {error!r}") from error
        self._finished_choices.update(dialect.ended_choices(content))
        return content

    def _shown(self, event: ServerSentEvent, content: dict[str, object] | None) -> bytes:
        """An event as the caller gets it."""
        if self._translated is not None:
            shown = [] if content is None else self._translated.add(content)
            return self._encoded([*shown, *self._translated.finish()] if self.is_over else shown)
        if content is not None:
            dialect, requested = self._call.dialect, self._call.requested
            if dialect.is_extra(content, requested):
                return b""
            if dialect.without_extras(content, requested):
                event = ServerSentEvent(orjson.dumps(content), event.name)
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
            record.usage = self._call.backend_dialect.usage_in(record.answer)
