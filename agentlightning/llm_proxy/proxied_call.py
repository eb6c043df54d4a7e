"""One call through the proxy: read, admitted, sent on, answered, recorded.

The request goes to the backend as it came, but for what must change: the model's name, fields that ask for token ids,
and the dialect where the backend speaks another. The answer goes back as it came, without what the caller did not ask
for. Before its last byte goes out the recorder has the call.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from agentlightning.asgi.bodies import check_values
from agentlightning.asgi.compression import THREAD_FROM_BYTES
from agentlightning.asgi.request import Request, Send
from agentlightning.asgi.response import NOSNIFF, Header, Response
from agentlightning.dialects.failures import BackendStreamError, Failure, failure_of, read_json
from agentlightning.dialects.translation import UntranslatableRequest
from agentlightning.errors import AgentLightningError, PayloadTooLarge, ProxyError, StoreUnavailable
from agentlightning.instrumentation.model_calls import RECORDED_HEADER, recording_of
from agentlightning.llm_proxy.attribution import Headers, Refused, Route, trace_parent
from agentlightning.llm_proxy.backends import BackendError, BackendResponse, UnknownModel
from agentlightning.llm_proxy.recorder import CallRecord, Origin, Outcome, PendingCall
from agentlightning.llm_proxy.replay import RecordedResponse
from agentlightning.llm_proxy.stream_relay import StreamRelay
from agentlightning.llm_proxy.upstream_request import UpstreamRequest

if TYPE_CHECKING:
    from agentlightning.llm_proxy.gateway import Gateway

logger = logging.getLogger(__name__)

MOST_ANSWER_VALUES: Final = 1_000_000
"""Of JSON in one answer."""
MOST_LEVELS: Final = 254
"""Of lists and objects within each other, that orjson can write; it reads some more."""
SPARE_LEVELS: Final = 32
"""Left for what translations and records put around a request."""
_SERVER_ERROR: Final = 500
_FIRST_ERROR: Final = 400
_PASSED: Final = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "openai-model", "x-should-retry")


class ProxiedCall:
    """One call."""

    def __init__(self, gateway: "Gateway", route: Route, request: Request, headers: Headers, send: Send) -> None:
        assert route.dialect is not None
        self._gateway = gateway
        self._dialect = route.dialect
        self._route = route
        self._request = request
        self._headers = headers
        self._send = send
        self._has_left = False
        self._is_finished = False
        self._earlier_tries = 0
        self._origin: Origin | None = None
        self._upstream: UpstreamRequest | None = None
        self._relay: StreamRelay | None = None
        self._pending: PendingCall | None = None
        trace_id, parent_id = trace_parent(headers) or (secrets.token_hex(16), None)
        self._record = CallRecord(
            origin=Origin("", ""),
            dialect=self._dialect,
            trace_id=trace_id,
            span_id=secrets.token_hex(8),
            raw_span_id=secrets.token_hex(8),
            parent_id=parent_id,
        )

    async def run(self) -> None:
        """Serve the call; nothing escapes but the end of the server."""
        watching: asyncio.Task[None] | None = None
        try:
            caller = self._gateway.authenticator.admit(self._route, self._headers)
            await self._gateway.check_attempt(caller)
            bodies, limit = self._gateway.bodies, self._gateway.settings.max_request_bytes
            async with bodies.read(self._request, max_bytes=limit) as self._record.request:
                watching = asyncio.create_task(self._watch(asyncio.current_task()), name="agl-proxy-caller")
                if caller.origin is None:
                    self._gateway.note_unattributed(self._route.path)
                else:
                    self._origin = self._record.origin = caller.origin
                    self._gateway.recorder.begin(caller.origin)
                requested = await bodies.parse(self._record.request, read_request)
            await self._serve(requested)
        except asyncio.CancelledError:
            if not self._has_left:
                self._finish("failed", 503, error="The proxy was stopped before the answer was complete.")
                raise
            # Recorded for a caller who did not wait for the answer; nginx's number, since HTTP has none.
            self._finish("cancelled", 499)
        except BackendStreamError as error:
            await self._fail(error.failure)
        except (Refused, AgentLightningError) as error:
            is_refused = not isinstance(error, ProxyError) or self._is_refused(error)
            await self._fail(failure_from(error), outcome="refused" if is_refused else "failed")
        except Exception:  # a fault of ours: the caller learns that there was one, the log what it was
            logger.exception("A model call could not be served.")
            await self._fail(Failure(_SERVER_ERROR, "The proxy failed to serve this call; its log says why.", None))
        finally:
            if watching is not None:
                watching.cancel()
            if self._upstream is not None:
                self._upstream.charge_budget(self._record)

    async def _watch(self, serving: "asyncio.Task[None] | None") -> None:
        """Stop serving when the caller leaves."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        if not self._is_finished and serving is not None:
            self._has_left = True
            serving.cancel()

    # ------------------------------------------------------------------ the record

    def _finish(self, outcome: Outcome, status: int, *, error: str | None = None) -> None:
        """The call is over; harmless the second time."""
        if self._is_finished:
            return
        self._is_finished = True
        record = self._record
        record.outcome, record.status, record.error = outcome, status, error
        if self._relay is not None:
            self._relay.complete(record)
        if self._upstream is not None:
            if self._relay is not None:
                self._upstream.note_tokens(record)
            if outcome == "failed":
                self._upstream.redact(record)
        if self._origin is not None:
            self._pending = self._gateway.recorder.finish(record)

    async def _stored(self) -> bool:
        """Wait a moment until the call is stored: what the caller does next is numbered after it."""
        return await self._gateway.recorder.wait_stored(self._pending)

    def _recorded_header(self) -> list[Header]:
        """The header that tells the caller's tracer not to store the content of the call a second time."""
        if self._origin is None:
            return []
        recording = recording_of(self._origin.rollout_id, self._origin.attempt_id, self._record.span_id)
        return [(RECORDED_HEADER.encode(), recording.encode())]

    def _is_refused(self, error: ProxyError) -> bool:
        """Whether no backend was called, because of what the call asks for."""
        if isinstance(error, BackendError) and error.tries:
            self._record.tries = self._earlier_tries + len(error.tries)
        return error.http_status < _SERVER_ERROR and not self._record.tries

    # ------------------------------------------------------------------ serving

    async def _serve(self, requested: dict[str, Any]) -> None:
        record = self._record
        record.model = requested["model"]
        record.is_stream = requested.get("stream") is True
        upstream = self._upstream = UpstreamRequest(
            self._gateway, self._dialect, self._origin, requested, record, self._headers
        )
        await upstream.resolve_model()
        while True:
            async with await upstream.send() as response:
                record.tries = self._earlier_tries + len(response.tries)
                record.waited_seconds = response.waited_seconds
                if response.status >= _FIRST_ERROR:
                    body = await response.read(self._gateway.settings.max_response_bytes)
                    if upstream.retry_without_extras(response.status, body):
                        self._earlier_tries = record.tries
                        continue
                    await self._pass_failure(response, upstream, body)
                elif record.is_stream:
                    await self._pass_stream(response, upstream)
                else:
                    await self._pass_whole(response, upstream)
                upstream.confirm()
                if record.usage is not None:
                    response.use_tokens(sum(record.usage))
                return

    async def _pass_whole(self, response: BackendResponse | RecordedResponse, upstream: UpstreamRequest) -> None:
        record = self._record
        body = record.response = await response.read(self._gateway.settings.max_response_bytes)
        answer = await asyncio.to_thread(_read_answer, body) if len(body) > THREAD_FROM_BYTES else _read_answer(body)
        if answer.get("error"):  # some report errors with a status of success
            body = record.response = upstream.redacted(body)
            answer = _read_answer(body)
        record.answer, record.usage = answer, upstream.backend_dialect.usage_in(answer)
        upstream.note_tokens(record)
        shown = _shown_answer(answer, upstream)
        self._finish("answered", response.status)
        headers = response_headers(response.headers)
        if await self._stored():
            headers += self._recorded_header()
        await Response(response.status, body if shown is None else shown, headers=headers).send(self._send)

    async def _pass_stream(self, response: BackendResponse | RecordedResponse, upstream: UpstreamRequest) -> None:
        """Pass a stream on as it arrives; what goes wrong before its first event is a plain error."""
        limit = self._gateway.settings.max_response_bytes
        relay = self._relay = StreamRelay(response, upstream, self._record.started_at, max_bytes=limit)
        async with contextlib.aclosing(relay.parts()) as parts:
            async for part in parts:
                if not relay.has_begun:
                    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), NOSNIFF]
                    headers += response_headers(response.headers)
                    if self._gateway.recorder.will_record:
                        headers += self._recorded_header()
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                    relay.has_begun = True
                if relay.is_over:
                    await self._finish_stream(relay)
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._finish_stream(relay)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _finish_stream(self, relay: StreamRelay) -> None:
        if relay.failure is None:
            self._finish("answered", 200)
        else:
            self._finish("failed", relay.failure.status, error=relay.failure.message)
        await self._stored()

    # ------------------------------------------------------------------ failing

    async def _pass_failure(
        self, response: BackendResponse | RecordedResponse, upstream: UpstreamRequest, body: bytes
    ) -> None:
        """A backend's error, as it came where the caller speaks its dialect."""
        body = self._record.response = upstream.redacted(body)
        failure = failure_of(response.status, body, api=upstream.backend_dialect.name)
        if upstream.backend_dialect is not self._dialect or not isinstance(read_json(body), dict):
            body = self._dialect.error_body(failure)
        self._finish("failed", response.status, error=failure.message)
        await self._stored()
        await Response(response.status, body, headers=response_headers(response.headers)).send(self._send)

    async def _fail(self, failure: Failure, *, outcome: Outcome = "failed") -> None:
        """Report a failure to the caller: as an answer, or within a stream that has begun."""
        if self._upstream is not None:
            failure = dataclasses.replace(failure, message=self._upstream.redacted_text(failure.message))
        self._finish(outcome, failure.status, error=failure.message)
        await self._stored()
        with contextlib.suppress(OSError):
            if self._relay is not None and self._relay.has_begun:
                event = self._dialect.error_event(failure, sequence_number=self._relay.shown_events)
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
                return
            headers: list[Header] = []
            if failure.retry_after is not None:
                headers.append((b"retry-after", str(math.ceil(failure.retry_after)).encode()))
            elif outcome == "refused":  # the SDKs of OpenAI and Anthropic would try some of these again
                headers.append((b"x-should-retry", b"false"))
            await Response(failure.status, self._dialect.error_body(failure), headers=headers).send(self._send)


def read_request(body: bytes) -> dict[str, Any]:
    """The request as an object that names a model; raises `Refused` for what is none."""
    try:
        request = orjson.loads(body)
    except ValueError as error:
        raise Refused(Failure(400, f"The request is not JSON: {error}", "invalid_request_error")) from None
    if not isinstance(request, dict):
        raise Refused(Failure(400, "The request must be a JSON object.", "invalid_request_error"))
    if not isinstance(request.get("model"), str) or not request["model"]:
        raise Refused(Failure(400, "The request names no model.", "invalid_request_error", param="model"))
    most_levels = MOST_LEVELS - SPARE_LEVELS
    if body.count(b"{") + body.count(b"[") > most_levels:
        nested: object = request
        for _ in range(SPARE_LEVELS):
            nested = [nested]
        try:
            orjson.dumps(nested)  # which counts levels far faster than we could
        except orjson.JSONEncodeError:
            message = f"The request has more than {most_levels} lists and objects within each other."
            raise Refused(Failure(400, message, "invalid_request_error")) from None
    return request


def _read_answer(body: bytes) -> dict[str, object]:
    try:
        check_values(body, MOST_ANSWER_VALUES)
    except PayloadTooLarge:
        raise ProxyError(f"The backend answered with more than {MOST_ANSWER_VALUES} values.") from None
    answer = read_json(body)
    if not isinstance(answer, dict):
        raise ProxyError(f"The backend answered what is not a JSON object: {body[:200]!r}")
    return answer


def _shown_answer(answer: Mapping[str, Any], upstream: UpstreamRequest) -> bytes | None:
    """What the caller gets of an answer; None if that is the answer as it came."""
    if upstream.translation is not None:
        return orjson.dumps(upstream.translation.response(answer, upstream.requested))
    if not upstream.has_extras:
        return None
    shown = dict(answer)  # copied as deep as fields are taken out, since the record keeps them
    if isinstance(shown.get("choices"), list):
        shown["choices"] = [dict(choice) if isinstance(choice, dict) else choice for choice in shown["choices"]]
    return orjson.dumps(shown) if upstream.dialect.without_extras(shown, upstream.requested) else None


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
    status = error.http_status if error.http_status != _SERVER_ERROR else 502
    if isinstance(error, UnknownModel):
        return Failure(status, str(error), None, "model_not_found", "model")
    if isinstance(error, BackendError):
        return Failure(status, str(error), None, retry_after=error.retry_after_seconds)
    return Failure(status, str(error), None, param=error.field if isinstance(error, UntranslatableRequest) else None)
