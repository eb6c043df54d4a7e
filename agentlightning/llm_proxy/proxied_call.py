"""One call through the proxy: read, admitted, sent on, answered, recorded.

The request goes to the backend as it came, but for what must change: the model's name, fields that ask for token ids,
and the dialect where the backend speaks another. It is made anew for each backend that is tried; one that refuses what
the proxy added is called again without, and remembered. The answer goes back as it came, without what the caller did
not ask for. Before its last byte goes out the recorder has the call.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import orjson

from agentlightning.asgi.compression import THREAD_FROM_BYTES
from agentlightning.asgi.request import Request, Send
from agentlightning.asgi.response import NOSNIFF, Header, Response
from agentlightning.dialects import Dialect, TranslatedDialect
from agentlightning.dialects.base import Translation
from agentlightning.dialects.failures import BackendStreamError, Failure, failure_of, read_json
from agentlightning.errors import AgentLightningError, ProxyError
from agentlightning.instrumentation.model_calls import RECORDED_HEADER, recording_of
from agentlightning.llm_proxy.answers import (
    FIRST_ERROR,
    SERVER_ERROR,
    StreamRelay,
    failure_from,
    read_answer,
    response_headers,
)
from agentlightning.llm_proxy.attribution import Headers, Refused, Route, read_request, request_headers, trace_parent
from agentlightning.llm_proxy.backends import Backend, BackendCall, BackendResponse, PreparedRequest
from agentlightning.llm_proxy.budgets import Prices, Reservation, is_about_limit, with_token_limit, with_whole_counts
from agentlightning.llm_proxy.recorder import CallRecord, Origin, Outcome, PendingCall
from agentlightning.llm_proxy.replay import RecordedResponse

if TYPE_CHECKING:
    from agentlightning.llm_proxy.gateway import Gateway

logger = logging.getLogger(__name__)

_IS_ABOUT_EXTRAS: Final = re.compile(
    rb"return_token_ids|logprobs|stream_options|include_usage|unrecognized|unknown|unexpected|extra|not permitted",
    re.IGNORECASE,
)


class ProxiedCall(BackendCall):
    """One call, from its request to its record."""

    def __init__(self, gateway: "Gateway", route: Route, request: Request, headers: Headers, send: Send) -> None:
        super().__init__()
        assert route.dialect is not None
        self.dialect = self.backend_dialect = route.dialect
        """The caller's, and the backend's."""
        self.requested: dict[str, Any] = {}
        """The caller's request."""
        self.translation: Translation | None = None
        """None, where the backend speaks the caller's dialect."""
        self.has_extras = False
        """Whether more is asked of the backend than the caller did."""
        self._gateway = gateway
        self._route = route
        self._request = request
        self._headers = headers
        self._send = send
        self._has_left = False
        self._is_finished = False
        self._origin: Origin | None = None
        self._overrides: Mapping[str, Any] = {}
        self._backend: Backend | None = None
        self._is_plain = False
        self._is_unlimited = False
        self._reservation: Reservation | None = None
        self._relay: StreamRelay | None = None
        self._pending: PendingCall | None = None
        trace_id, parent_id = trace_parent(headers) or (secrets.token_hex(16), None)
        self._record = CallRecord(
            origin=Origin("", ""),
            dialect=self.dialect,
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
                    self.rollout_id = caller.origin.rollout_id
                    self._gateway.recorder.begin(caller.origin)
                self.requested = await bodies.parse(self._record.request, read_request)
            await self._serve()
        except asyncio.CancelledError:
            if not self._has_left:
                self._finish("failed", 503, error="The proxy was stopped before the answer was complete.")
                raise
            # Recorded for a caller who did not wait for the answer; nginx's number, since HTTP has none.
            self._finish("cancelled", 499)
        except BackendStreamError as error:
            await self._fail(error.failure)
        except (Refused, AgentLightningError) as error:
            # Refused: no backend was called, because of what the call asks for.
            is_refused = not isinstance(error, ProxyError) or (error.http_status < SERVER_ERROR and not self.tries)
            await self._fail(failure_from(error), outcome="refused" if is_refused else "failed")
        except Exception:  # a fault of ours: the caller learns that there was one, the log what it was
            logger.exception("A model call could not be served.")
            await self._fail(Failure(SERVER_ERROR, "The proxy failed to serve this call; its log says why.", None))
        finally:
            if watching is not None:
                watching.cancel()
            self._charge_budget()
            self._relay = None  # which holds the call: what it received is freed at once

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
        record.tries, record.waited_seconds = len(self.tries), self.waited_seconds
        if self._relay is not None:
            self._relay.complete(record)
            self._note_tokens()
        if outcome == "failed":
            redacted = self.redacted(record.response)
            if redacted is not record.response:
                record.response, record.answer = redacted, None  # which is read again from what is left
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

    def _note_tokens(self) -> None:
        """Write on the record whether the token ids came."""
        record = self._record
        if isinstance(record.answer, Mapping) and self.backend_dialect.has_token_ids(record.answer):
            record.token_ids = "given"
        elif self.backend_dialect.carries_tokens and isinstance(record.sent_json, Mapping):
            was_asked = record.sent_json.get("return_token_ids") or self._is_plain
            record.token_ids = "not given" if was_asked else "not asked"

    def redacted(self, body: bytes) -> bytes:
        """Text of a backend without its secrets, should it repeat them."""
        return body if self._backend is None else self._backend.redacted_bytes(body)

    # ------------------------------------------------------------------ serving

    async def _serve(self) -> None:
        gateway, record = self._gateway, self._record
        record.model = self.requested["model"]
        record.is_stream = self.requested.get("stream") is True
        self._overrides = await gateway.resolve(self, self._origin, record.model)
        if gateway.replays is not None and self._origin is not None:
            recorded = await gateway.replays.find(gateway.attempts, self._origin, self.dialect, self.requested)
            if recorded is not None:
                self._use_replay(recorded)
                await self._pass(recorded)
                return
        while True:
            async with await gateway.backends.send(self) as response:
                if await self._pass(response):
                    break
        if self._is_plain and self._backend is not None and record.outcome == "answered":
            # It took a second, plain call; from now on the backend gets only such.
            gateway.plain_backends.add(self._backend.name)
        if record.usage is not None:
            response.use_tokens(sum(record.usage))

    async def _pass(self, response: BackendResponse | RecordedResponse) -> bool:
        """Pass a response on; False if the backend is to be called again."""
        if response.status >= FIRST_ERROR:
            body = await response.read(self._gateway.settings.max_response_bytes)
            if self._retry_without_extras(response.status, body):
                return False
            await self._pass_failure(response, body)
        elif self._record.is_stream:
            await self._pass_stream(response)
        else:
            await self._pass_whole(response)
        return True

    async def _pass_whole(self, response: BackendResponse | RecordedResponse) -> None:
        record = self._record
        body = record.response = await response.read(self._gateway.settings.max_response_bytes)
        answer = await asyncio.to_thread(read_answer, body) if len(body) > THREAD_FROM_BYTES else read_answer(body)
        if answer.get("error"):  # some report errors with a status of success
            body = record.response = self.redacted(body)
            answer = read_answer(body)
        record.answer, record.usage = answer, self.backend_dialect.usage_in(answer)
        self._note_tokens()
        shown = self._shown(answer)
        self._finish("answered", response.status)
        headers = response_headers(response.headers)
        if await self._stored():
            headers += self._recorded_header()
        await Response(response.status, body if shown is None else shown, headers=headers).send(self._send)

    def _shown(self, answer: Mapping[str, Any]) -> bytes | None:
        """What the caller gets of an answer; None if that is the answer as it came."""
        if self.translation is not None:
            return orjson.dumps(self.translation.response(answer, self.requested))
        if not self.has_extras:
            return None
        shown = dict(answer)  # copied as deep as fields are taken out, since the record keeps them
        if isinstance(shown.get("choices"), list):
            shown["choices"] = [dict(choice) if isinstance(choice, dict) else choice for choice in shown["choices"]]
        return orjson.dumps(shown) if self.dialect.without_extras(shown, self.requested) else None

    async def _pass_stream(self, response: BackendResponse | RecordedResponse) -> None:
        """Pass a stream on as it arrives; what goes wrong before its first event is a plain error."""
        limit = self._gateway.settings.max_response_bytes
        relay = self._relay = StreamRelay(response, self, self._record.started_at, max_bytes=limit)
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

    async def _pass_failure(self, response: BackendResponse | RecordedResponse, body: bytes) -> None:
        """A backend's error, as it came where the caller speaks its dialect."""
        body = self._record.response = self.redacted(body)
        failure = failure_of(response.status, body, api=self.backend_dialect.name)
        if self.backend_dialect is not self.dialect or not isinstance(read_json(body), dict):
            body = self.dialect.error_body(failure)
        self._finish("failed", response.status, error=failure.message)
        await self._stored()
        await Response(response.status, body, headers=response_headers(response.headers)).send(self._send)

    async def _fail(self, failure: Failure, *, outcome: Outcome = "failed") -> None:
        """Report a failure to the caller: as an answer, or within a stream that has begun."""
        if self._backend is not None:
            failure = dataclasses.replace(failure, message=self._backend.redacted(failure.message))
        self._finish(outcome, failure.status, error=failure.message)
        await self._stored()
        with contextlib.suppress(OSError):
            if self._relay is not None and self._relay.has_begun:
                event = self.dialect.error_event(failure, sequence_number=self._relay.shown_events)
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
                return
            headers: list[Header] = []
            if failure.retry_after is not None:
                headers.append((b"retry-after", str(math.ceil(failure.retry_after)).encode()))
            elif outcome == "refused":  # the SDKs of OpenAI and Anthropic would try some of these again
                headers.append((b"x-should-retry", b"false"))
            await Response(failure.status, self.dialect.error_body(failure), headers=headers).send(self._send)

    # ------------------------------------------------------------------ the request to a backend

    def _use_replay(self, recorded: RecordedResponse) -> None:
        record = self._record
        self._speak(recorded.dialect)
        self.has_extras = True  # the record may hold what the caller did not ask for
        record.sent = b"" if recorded.sent == record.request else recorded.sent
        record.sent_json = orjson.loads(recorded.sent)
        record.provider, record.replayed_from = recorded.provider, recorded.span_id
        record.backend, record.version, record.backend_dialect = recorded.backend, recorded.version, recorded.dialect

    def _speak(self, dialect: Dialect) -> None:
        self.backend_dialect, self.translation = dialect, None
        if isinstance(dialect, TranslatedDialect) and isinstance(self.dialect, TranslatedDialect):
            self.translation = None if dialect is self.dialect else Translation(self.dialect, dialect)

    def prepare(self, backend: Backend) -> PreparedRequest:
        record, gateway = self._record, self._gateway
        self._backend = backend
        dialect = backend.serving(self.dialect)
        self._speak(dialect)
        request = self._overridden(backend, dialect)
        if self._overrides:
            request = {**request, **self._overrides}
        body = request if self.translation is None else self.translation.request(request)
        if backend.defaults:
            body = {**backend.defaults, **body}
        has_new_counts = False
        if gateway.budgets.is_limited:
            whole = with_whole_counts(dialect, body)
            has_new_counts = whole is not body
            body = self._within_budget(backend, dialect, whole)
        if body.get("model") != backend.model:
            body = {**body, "model": backend.model}
        body = self._with_extras(backend, dialect, body)
        # A count that was made whole equals the one that came, and backends may read that as another.
        sent = record.request if body == self.requested and not has_new_counts else orjson.dumps(body)
        record.sent_json, record.sent = body, b"" if sent is record.request else sent
        record.backend, record.provider, record.version = backend.name, backend.provider, backend.version
        record.backend_dialect = dialect
        headers, origin = request_headers(self._headers), self._origin
        if backend.provider == "agl" and origin is not None:  # an engine of ours may need to know whose call it is
            headers["x-rollout-id"], headers["x-attempt-id"] = quote(origin.rollout_id), quote(origin.attempt_id)
        return PreparedRequest(backend.url_of(dialect), sent, headers)

    def _overridden(self, backend: Backend, dialect: Dialect) -> dict[str, object]:
        """The caller's request, but for fields that the backend's entry overrides for the rollout's resources."""
        overrides = backend.overrides.get(self.resources_id or "")
        if overrides is None or not dialect.limit_fields:
            return self.requested
        for name, value in overrides.items():
            reported = (backend.model_name, name)
            if self.requested.get(name) not in (None, value) and reported not in self._gateway.overridden_fields:
                self._gateway.overridden_fields.add(reported)
                logger.warning(
                    "Calls of model '%s' ask for %s=%.80r, which its entry of the model list overrides for their "
                    "resources '%s'; it is not heeded. Further ones are not told.",
                    *(backend.model_name, name, self.requested[name], self.resources_id),
                )
        removed = [name for name, value in overrides.items() if value is None]
        return {name: value for name, value in {**self.requested, **overrides}.items() if name not in removed}

    def _with_extras(self, backend: Backend, dialect: Dialect, body: dict[str, object]) -> dict[str, object]:
        """Ask for token ids, log-probabilities and the usage of a stream, where the backend may have them."""
        settings, record = self._gateway.settings, self._record
        self.has_extras = False
        record.token_ids = "not asked"
        if not dialect.carries_tokens or self._is_plain or backend.name in self._gateway.plain_backends:
            return body
        ids = settings.asks_for_ids and backend.gives_token_ids is not False
        logprobs = settings.asks_for_logprobs and backend.gives_logprobs is True
        extended = dialect.with_tokens(body, ids=ids, logprobs=logprobs) if ids or logprobs else body
        asks_for_anything = settings.asks_for_ids or settings.asks_for_logprobs or self._gateway.budgets.is_limited
        if record.is_stream and asks_for_anything:
            extended = dialect.with_usage(extended)
        self.has_extras = extended != body
        return extended

    def _retry_without_extras(self, status: int, answer: bytes) -> bool:
        """Whether to send the call again without what we added, because the backend did not take it."""
        if status not in (400, 422):
            return False
        reservation = self._reservation
        if reservation is not None and not self._is_unlimited and reservation.is_ours:
            # A backend with less room than our limit writes what fits if there is none.
            self._is_unlimited = reservation.most_written is not None and is_about_limit(answer)
            if self._is_unlimited:
                return True
        if not self.has_extras or self._is_plain:
            return False
        is_sure = self._backend is not None and self._backend.gives_token_ids is True
        self._is_plain = not is_sure or _IS_ABOUT_EXTRAS.search(answer) is not None
        return self._is_plain

    def _within_budget(self, backend: Backend, dialect: Dialect, body: dict[str, object]) -> dict[str, object]:
        prices = Prices(backend.input_cost_per_token or 0.0, backend.output_cost_per_token or 0.0)
        if self._reservation is not None and self._reservation.prices != prices:
            self._reservation.cancel()
            self._reservation = None
        if self._reservation is None:
            self._reservation = self._gateway.budgets.admit(self.rollout_id or None, dialect, body, prices)
        most = self._reservation.most_written
        return body if most is None or self._is_unlimited else with_token_limit(dialect, body, most, backend.provider)

    def _charge_budget(self) -> None:
        """The call is over, however it ended."""
        if self._reservation is not None:
            record = self._record
            is_begun = record.first_part_seconds is not None or (bool(record.response) and record.outcome != "failed")
            self._reservation.charge(record.usage, is_begun=is_begun)
            self._reservation = None
