"""CallRecording: one call of a model becomes one span, from its request to the end of its answer.

Several layers may see the same call: a framework, a client library, an SDK. The innermost makes the span, because it
has the exact answer; those above open a `CallWatch` if they need to know whether anyone below did.

The body of a response is recorded while its reader reads it: the SDKs read every body through `iter_bytes` or
`aiter_bytes` of an httpx response, be it a stream of events, a raw response, or JSON. Those of this one response are
replaced by readers that pass each piece on unchanged.
"""

import functools
import json
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import quote

import orjson
from opentelemetry.trace import SpanKind
from typing_extensions import Self

from agentlightning.dialects import Assembler, Dialect
from agentlightning.dialects.attributes import response_attributes
from agentlightning.dialects.sse import DONE, SseParser
from agentlightning.instrumentation.patch import Step
from agentlightning.semconv import IS_CUT, RECORDED_AS, TIME_TO_FIRST_TOKEN, VERSION_ATTRIBUTE
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)


RECORDED_HEADER: Final = "x-agl-recorded"
"""Of an answer of the LLM proxy: the attempt for which it recorded the call, and the span that holds the content."""
WATCHES: ContextVar[tuple["CallWatch", ...]] = ContextVar("agentlightning_call_watches", default=())
"""Those that are open here, the innermost last."""


def recording_of(rollout_id: str, attempt_id: str, span_id: str) -> str:
    """The value of `RECORDED_HEADER` for a call."""
    return "/".join(quote(part, safe="") for part in (rollout_id, attempt_id, span_id))


class CallWatch:
    """Notices whether a model call is recorded in the context that it is opened in, or in one that inherits from it."""

    def __init__(self) -> None:
        self.has_seen = False

    def open(self) -> Self:
        WATCHES.set((*WATCHES.get(), self))
        return self

    def close(self) -> None:
        """Harmless the second time, and in another context than it was opened in."""
        WATCHES.set(tuple(watch for watch in WATCHES.get() if watch is not self))

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class CallRecording:
    """The span of one call. Nothing that goes wrong here reaches the caller of the model."""

    def __init__(
        self,
        dialect: Dialect,
        body: Mapping[str, Any],
        *,
        attributes: Mapping[str, Any] | None = None,
        start_time_ns: int | None = None,
        step: Step | None = None,
        is_proxied: bool = False,
    ) -> None:
        """Begin.

        Args:
            body: The request as JSON.
            attributes: To be written besides what the request says; they win.
            start_time_ns: When the call began, since the epoch; now, if left out.
            step: The span of the call; one of its own, if left out.
            is_proxied: The call goes to an LLM proxy, which may record it: `note_response` will tell.
        """
        for watch in WATCHES.get():
            watch.has_seen = True
        self.dialect = dialect
        self._start_time_ns = time.time_ns() if start_time_ns is None else start_time_ns
        self._assembler: Assembler | None = None
        self._first_token_seconds: float | None = None
        self._is_ended = False
        self._known: dict[str, Any] = {}  # written when the call ends, with the answer: twice would cost more
        self._attributes = attributes or {}
        self._recorded: tuple[bytes, bytes | None] | None = None
        """Of a call that the LLM proxy recorded, the request and, unless it is a stream, the response."""
        # A caller may add to its messages while it waits.
        self._request = {name: value[:] if type(value) is list else value for name, value in body.items()}
        self.step = step or Step(dialect.span_name, kind=SpanKind.CLIENT, start_time=start_time_ns)
        if not is_proxied:
            self._read_request()

    def _read_request(self) -> None:
        request, self._request = self._request, {}
        if self._recorded is not None:
            request = {name: value for name, value in request.items() if name not in self.dialect.content_fields}
        # A request of a shape we do not know is still a call.
        with log_failures(logger, "A request to a model could not be read; its span says nothing of it."):
            self._known.update(self.dialect.request_attributes(request) if request else {})

    def note_response(self, response: Any) -> None:
        """Take from a response of the HTTP client, whose body need not be there yet, whether the proxy recorded it."""
        recording = response.headers.get(RECORDED_HEADER)
        if recording:
            self._attributes = {**self._attributes, RECORDED_AS: recording}
        if recording and self._request:
            # Not the response itself: when it is forgotten, a stream is over.
            self._recorded = response.request.content, response.content if response.is_closed else None
        self._read_request()

    def add_event(self, event: Mapping[str, object]) -> None:
        """One event of a stream."""
        if self._is_ended:
            return
        with log_failures(logger, "An event of a model's answer could not be read."):
            if self._assembler is None:
                self._assembler = self.dialect.assembler()
            if self._assembler is not None and self._assembler.add(event) and self._first_token_seconds is None:
                self._first_token_seconds = max(time.time_ns() - self._start_time_ns, 0) / 1e9

    def finish(
        self, response: object = None, *, error: BaseException | str | None = None, is_cut: bool = False
    ) -> None:
        """End with a response or, if it came as a stream, with what its events gave; harmless the second time.

        Args:
            is_cut: The caller stopped reading before the end.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self._read_request()
        if response is None and self._assembler is not None:
            response = self._assembler.response()
        with log_failures(logger, "A model's answer could not be read; its span says nothing of it."):
            self._known.update(self._answer(response, is_cut=is_cut))
        self.step.set({**self._known, **self._attributes})
        if self._recorded is not None:
            sent, body = self._recorded
            # What the caller got is the caller's, who may change it; what we put together is ours.
            received = response if body is None or isinstance(response, dict) else body
            self.step.defer(functools.partial(_content, self.dialect, sent, received))
        self.step.end(error=error)

    def _answer(self, response: object, *, is_cut: bool) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if response is not None and self._recorded is not None:
            attributes = response_attributes(response)
            attributes.pop(VERSION_ATTRIBUTE, None)
        elif response is not None:
            attributes = dict(self.dialect.response_attributes(response))
        if self._first_token_seconds is not None:
            attributes[TIME_TO_FIRST_TOKEN] = self._first_token_seconds
        if is_cut:
            # The stream was left before its end.
            attributes[IS_CUT] = True
        return attributes


def _content(dialect: Dialect, sent: bytes, received: object) -> dict[str, Any]:
    """The content of a call, from the request and from the response, or its body, as they went over the network."""
    attributes: dict[str, Any] = {}
    with log_failures(logger, "The content of a model call could not be read."):
        attributes |= dialect.request_attributes(_parsed(sent))
        response = _parsed(received) if isinstance(received, bytes) else received
        attributes |= {} if response is None else dialect.response_attributes(response)
    return attributes


# ---------------------------------------------------------------------- reading along

_End = Callable[..., None]
"""Called once or more when nothing more will be read, with the error if there was one."""


def read_along(call: CallRecording, response: Any) -> None:
    """Finish a call when the body of its response has been read, or the response is closed or forgotten."""
    body = _Body(call, response)
    if response.is_closed:  # it was read already
        body.take(response.content)
        body.end()
        return
    ours: dict[str, Any] = {}

    def end(error: BaseException | None = None) -> None:
        for name, reader in ours.items():
            if vars(response).get(name) is reader:  # a response that was read is as it would have been
                delattr(response, name)
        body.end(error)

    ours |= {**_readers(response, body, end), **_async_readers(response, body, end)}
    vars(response).update(ours)
    weakref.finalize(response, body.end).atexit = False


class _Body:
    """What has been read of a body so far, as the events or the JSON it consists of."""

    def __init__(self, call: CallRecording, response: Any) -> None:
        self._call = call
        self._parser = SseParser() if "text/event-stream" in response.headers.get("content-type", "") else None
        self._pieces: list[bytes] = []
        """Of a body that is no stream."""
        self._is_done = False
        self.is_being_read = False

    def take(self, piece: bytes) -> None:
        """The next piece of the body."""
        if self._parser is None:
            self._pieces.append(piece)
            return
        with log_failures(logger, "A model's answer could not be read along."):
            for event in self._parser.feed(piece):
                self._take_event(event.data.strip())

    def _take_event(self, data: bytes) -> None:
        if data == DONE.data:
            self._is_done = True
            return
        try:
            event = _parsed(data) if data else None
        except ValueError:
            logger.exception("An event of a model's answer is not JSON.")
            return
        if isinstance(event, Mapping):
            self._note_end(event)
            self._call.add_event(event)

    def _note_end(self, event: Mapping[str, object]) -> None:
        kind = event.get("type")
        if kind in self._call.dialect.last_events:
            self._is_done = True
        if event.get("error") or kind == "error":
            error = event.get("error") or event
            self._call.finish(error=str(error.get("message") if isinstance(error, Mapping) else error))

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will be read."""
        if self._parser is not None:  # some servers leave the last blank line out
            self._is_done |= self._parser.close().removeprefix(b"data:").strip() == DONE.data
            self._call.finish(error=error, is_cut=not self._is_done)
            return
        rest, self._pieces = b"".join(self._pieces), []
        try:
            response = _parsed(rest)
        except ValueError:
            self._call.finish(error=error, is_cut=True)
        else:
            self._call.finish(response if isinstance(response, Mapping) else None, error=error)


def _parsed(text: bytes) -> Any:
    """JSON, also where it has infinite numbers or halves of characters, as the SDKs read it."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text)


@contextmanager
def _ended(end: _End) -> Iterator[None]:
    """Say that nothing more is read when a reader leaves, and with what error."""
    try:
        yield
    except GeneratorExit:
        end()
        raise
    except BaseException as error:
        end(error)
        raise
    end()


def _readers(response: Any, body: _Body, end: _End) -> dict[str, Any]:
    read, close = response.iter_bytes, response.close

    def iter_bytes(*args: object, **kwargs: object) -> Iterator[bytes]:
        pieces = read(*args, **kwargs)
        with _ended(end):
            while (piece := read_next(pieces)) is not None:
                body.take(piece)
                yield piece

    def read_next(pieces: Iterator[bytes]) -> bytes | None:
        body.is_being_read = True
        try:
            return next(pieces, None)
        finally:
            body.is_being_read = False

    def close_too() -> None:
        try:
            close()
        finally:
            if not body.is_being_read:  # the last piece may come after the body closed itself
                end()

    return {"iter_bytes": iter_bytes, "close": close_too}


def _async_readers(response: Any, body: _Body, end: _End) -> dict[str, Any]:
    read, close = response.aiter_bytes, response.aclose

    async def aiter_bytes(*args: object, **kwargs: object) -> AsyncIterator[bytes]:
        pieces = read(*args, **kwargs).__aiter__()
        with _ended(end):
            while (piece := await read_next(pieces)) is not None:
                body.take(piece)
                yield piece

    async def read_next(pieces: AsyncIterator[bytes]) -> bytes | None:
        body.is_being_read = True
        try:
            return await anext(pieces, None)
        finally:
            body.is_being_read = False

    async def close_too() -> None:
        try:
            await close()
        finally:
            if not body.is_being_read:
                end()

    return {"aiter_bytes": aiter_bytes, "aclose": close_too}
