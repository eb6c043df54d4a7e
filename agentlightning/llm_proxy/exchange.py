"""One call through the proxy: read, admitted, sent on, answered, recorded.

The request goes to the backend as it came, but for what must change: the model's name, fields that ask for token ids,
and the dialect where the backend speaks another. The answer goes back as it came, without what the caller did not ask
for. Before its last byte goes out the call is in the recorder's hands.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from agentlightning.dialects.failures import (
    BackendStreamError,
    Failure,
    error_body,
    error_event,
    failure_of,
)
from agentlightning.errors import ProxyError, StoreUnavailable
from agentlightning.instrumentation.model_calls import RECORDED_HEADER, recording_of
from agentlightning.llm_proxy.attribution import Headers, Refused, Route, parent_of
from agentlightning.llm_proxy.backends import BackendError, UnknownModel
from agentlightning.llm_proxy.outgoing import OutgoingCall
from agentlightning.llm_proxy.recorder import PendingCall
from agentlightning.llm_proxy.records import CallRecord, Origin, Outcome
from agentlightning.llm_proxy.relay import StreamRelay, usage_of, visible_answer
from agentlightning.llm_proxy.translation import UntranslatableRequest
from agentlightning.llm_proxy.wire import answer_headers, read_body, send_answer

if TYPE_CHECKING:
    from agentlightning.llm_proxy.backends import BackendResponse
    from agentlightning.llm_proxy.gateway import Gateway
    from agentlightning.llm_proxy.replay import RecordedAnswer

__all__ = ["Exchange", "failure_from", "read_request"]

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_LEVELS: Final = 254
"""Of lists and objects within each other, that orjson can write; it reads some more."""
SPARE_LEVELS: Final = 32
"""Left for what translations and records put around a request."""
LEFT_STATUS: Final = 499
"""What is noted for a caller who did not wait for the answer; nginx's number, since HTTP has none."""
_SERVER_ERROR: Final = 500
_FIRST_ERROR: Final = 400


class Exchange:
    """One call."""

    def __init__(self, gateway: "Gateway", route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        assert route.dialect is not None
        self.gateway = gateway
        self.dialect = route.dialect
        self._route = route
        self._headers = headers
        self._receive = receive
        self._send = send
        self._has_left = False
        self._is_finished = False
        self._earlier_tries = 0
        self._record: CallRecord | None = None
        self._origin: Origin | None = None
        self._outgoing: OutgoingCall | None = None
        self._relay: StreamRelay | None = None
        self._pending: PendingCall | None = None

    async def run(self) -> None:
        """Serve the call; nothing escapes but the end of the server."""
        watching: asyncio.Task[None] | None = None
        try:
            caller = self.gateway.authenticator.admit(self._route, self._headers)
            self._origin = caller.origin
            request = await read_body(self._receive, self._headers, self.gateway.settings.max_request_bytes)
            watching = asyncio.create_task(self._watch(asyncio.current_task()), name="agl-proxy-caller")
            self._begin(request)
            await self.gateway.check_attempt(caller)
            if self._origin is None:
                self.gateway.note_unattributed(self._route.path)
            await self._serve(request)
        except asyncio.CancelledError:
            if not self._has_left:
                self._finish("failed", 503, error="The proxy was stopped before the answer was complete.")
                raise
            self._finish("cancelled", LEFT_STATUS)
        except Refused as refusal:
            await self._fail(refusal.failure, outcome="refused")
        except BackendStreamError as error:
            await self._fail(error.failure)
        except ProxyError as error:
            self._note_tries(error)
            await self._fail(failure_from(error), outcome="refused" if self._is_unasked(error) else "failed")
        except StoreUnavailable as error:
            await self._fail(Failure(503, f"The proxy cannot reach its store: {error}", None), outcome="refused")
        except Exception:  # a fault of ours: the caller is told that there was one, the log what it was
            logger.exception("A model call could not be served.")
            await self._fail(Failure(_SERVER_ERROR, "The proxy failed to serve this call; its log says why.", None))
        finally:
            if watching is not None:
                watching.cancel()
            if self._outgoing is not None:
                self._outgoing.settle_budget(self._record)

    async def _watch(self, serving: "asyncio.Task[None] | None") -> None:
        """Stop serving when the caller leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_finished and serving is not None:
            self._has_left = True
            serving.cancel()

    # ------------------------------------------------------------------ the record

    def _begin(self, request: bytes) -> None:
        parent = parent_of(self._headers)
        self._record = CallRecord(
            origin=self._origin or Origin("", ""),
            dialect=self.dialect,
            trace_id=secrets.token_hex(16) if parent is None else parent.trace_id,
            span_id=secrets.token_hex(8),
            raw_span_id=secrets.token_hex(8),
            parent_id=None if parent is None else parent.span_id,
            request=request,
        )
        if self._origin is not None:
            self.gateway.recorder.begin(self._origin)

    def _finish(self, outcome: Outcome, status: int, *, error: str | None = None) -> None:
        """The call is over; harmless the second time."""
        if self._is_finished:
            return
        self._is_finished = True
        record = self._record
        if record is None:
            return
        record.outcome, record.status, record.error = outcome, status, error
        if self._relay is not None:
            self._relay.complete(record)
        if self._outgoing is not None:
            if self._relay is not None:
                self._outgoing.note_tokens(record)
            if outcome == "failed":
                self._outgoing.redact(record)
        if self._origin is not None:
            self._pending = self.gateway.recorder.finish(record)

    async def _stored(self) -> bool:
        """Wait a moment until the call is stored: what the caller does next is numbered after it."""
        return await self.gateway.recorder.stored(self._pending)

    def _recorded_header(self) -> list[tuple[bytes, bytes]]:
        """The header that tells the caller's tracer not to store the content of the call a second time."""
        if self._origin is None or self._record is None:
            return []
        recording = recording_of(self._origin.rollout_id, self._origin.attempt_id, self._record.span_id)
        return [(RECORDED_HEADER.encode(), recording.encode())]

    def _note_tries(self, error: ProxyError) -> None:
        if self._record is not None and isinstance(error, BackendError) and error.tries:
            self._record.tries = self._earlier_tries + len(error.tries)

    def _is_unasked(self, error: ProxyError) -> bool:
        """Whether no backend has heard of the call, because of what it asks for."""
        return error.http_status < _SERVER_ERROR and (self._record is None or not self._record.tries)

    # ------------------------------------------------------------------ serving

    async def _serve(self, request: bytes) -> None:
        record = self._record
        assert record is not None
        asked = read_request(request)
        record.model = asked["model"]
        record.is_stream = asked.get("stream") is True
        outgoing = self._outgoing = OutgoingCall(self.gateway, self.dialect, self._origin, asked, record, self._headers)
        await outgoing.settle_model()
        while True:
            async with await outgoing.answered() as answer:
                record.tries = self._earlier_tries + len(answer.tries)
                record.waited_seconds = answer.waited_seconds
                if answer.status >= _FIRST_ERROR:
                    body = await answer.read(self.gateway.settings.max_response_bytes)
                    if outgoing.takes_back_extras(answer.status, body):
                        self._earlier_tries = record.tries
                        continue
                    await self._pass_failure(answer, outgoing, body)
                elif record.is_stream:
                    await self._stream(answer, outgoing)
                else:
                    await self._pass_whole(answer, outgoing)
                outgoing.confirm()
                if record.usage is not None:
                    answer.use_tokens(sum(record.usage))
                return

    async def _pass_whole(self, answer: "BackendResponse | RecordedAnswer", outgoing: OutgoingCall) -> None:
        record = self._record
        assert record is not None
        body = record.response = await answer.read(self.gateway.settings.max_response_bytes)
        record.answer = read = _read_answer(body)
        if read.get("error"):  # some tell of errors with a status of success
            body = record.response = outgoing.redacted(body)
            record.answer = read = _read_answer(body)
        outgoing.note_tokens(record)
        record.usage = usage_of(read)
        shown = visible_answer(read, outgoing)
        self._finish("answered", answer.status)
        headers = answer_headers(answer.headers, content_type="application/json")
        if await self._stored():
            headers += self._recorded_header()
        await send_answer(self._send, answer.status, headers, body if shown is None else shown)

    async def _stream(self, answer: "BackendResponse | RecordedAnswer", outgoing: OutgoingCall) -> None:
        """Pass a stream on as it arrives; what goes wrong before its first event is a plain error."""
        record = self._record
        assert record is not None
        limit = self.gateway.settings.max_response_bytes
        relay = self._relay = StreamRelay(answer, outgoing, record.started_at, max_bytes=limit)
        async with contextlib.aclosing(relay.parts()) as parts:
            async for part in parts:
                if not relay.has_begun:
                    headers = relay.headers()
                    if self.gateway.recorder.will_record:
                        headers += self._recorded_header()
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                    relay.has_begun = True
                if relay.is_over:
                    self._finish_stream(relay)
                    await self._stored()
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self._finish_stream(relay)
        await self._stored()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _finish_stream(self, relay: StreamRelay) -> None:
        failure = relay.failure
        if failure is None:
            self._finish("answered", 200)
        else:
            self._finish("failed", failure.status, error=failure.message)

    # ------------------------------------------------------------------ failing

    async def _pass_failure(
        self, answer: "BackendResponse | RecordedAnswer", outgoing: OutgoingCall, body: bytes
    ) -> None:
        """A backend's error, as it came where the caller speaks its dialect."""
        record = self._record
        assert record is not None
        assert record.backend_dialect is not None
        body = record.response = outgoing.redacted(body)
        failure = failure_of(record.backend_dialect, answer.status, answer.headers, body)
        if record.backend_dialect != self.dialect or not isinstance(_read(body), dict):
            body = error_body(self.dialect, failure)
        self._finish("failed", answer.status, error=failure.message)
        await self._stored()
        headers = answer_headers(answer.headers, content_type="application/json")
        await send_answer(self._send, answer.status, headers, body)

    async def _fail(self, failure: Failure, *, outcome: Outcome = "failed") -> None:
        """Tell the caller of a failure: as an answer, or within a stream that has begun."""
        if self._outgoing is not None:
            failure = dataclasses.replace(failure, message=self._outgoing.redacted_text(failure.message))
        self._finish(outcome, failure.status, error=failure.message)
        await self._stored()
        with contextlib.suppress(OSError):
            if self._relay is not None and self._relay.has_begun:
                event = error_event(self.dialect, failure, sequence_number=self._relay.shown_events)
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
                return
            headers = [(b"content-type", b"application/json")]
            if failure.retry_after is not None:
                headers.append((b"retry-after", str(math.ceil(failure.retry_after)).encode()))
            # The SDKs of OpenAI and Anthropic would try some of these again.
            if outcome == "refused" and failure.retry_after is None:
                headers.append((b"x-should-retry", b"false"))
            await send_answer(self._send, failure.status, headers, error_body(self.dialect, failure))


def read_request(request: bytes) -> dict[str, Any]:
    """The request as an object that names a model; raises `Refused` for what is none."""
    try:
        asked = orjson.loads(request)
    except ValueError as error:
        raise Refused(Failure(400, f"The request is not JSON: {error}", "invalid_request_error")) from None
    if not isinstance(asked, dict):
        raise Refused(Failure(400, "The request must be a JSON object.", "invalid_request_error"))
    if not isinstance(asked.get("model"), str) or not asked["model"]:
        raise Refused(Failure(400, "The request names no model.", "invalid_request_error", param="model"))
    may_be_deep = request.count(b"{") + request.count(b"[") > MOST_LEVELS - SPARE_LEVELS
    if may_be_deep and not _can_be_written(asked):
        words = f"The request has more than {MOST_LEVELS - SPARE_LEVELS} lists and objects within each other."
        raise Refused(Failure(400, words, "invalid_request_error"))
    return asked


def _can_be_written(value: Any) -> bool:
    """Whether a value can be written as JSON, with levels to spare; orjson counts them far faster than we could."""
    for _ in range(SPARE_LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def _read(body: bytes) -> Any:
    """What a backend says; None for what is not JSON."""
    try:
        return orjson.loads(body)
    except ValueError:
        return None


def _read_answer(body: bytes) -> Mapping[str, Any]:
    answer = _read(body)
    if not isinstance(answer, dict):
        raise ProxyError(f"The backend answered what is not a JSON object: {body[:200]!r}")
    return answer


def failure_from(error: ProxyError) -> Failure:
    """What the caller is told of an error on the way to a backend."""
    status = error.http_status if error.http_status != _SERVER_ERROR else 502
    if isinstance(error, UnknownModel):
        return Failure(status, str(error), None, "model_not_found", "model")
    if isinstance(error, BackendError):
        return Failure(status, str(error), None, retry_after=error.retry_after_seconds)
    return Failure(status, str(error), None, param=error.field if isinstance(error, UntranslatableRequest) else None)
