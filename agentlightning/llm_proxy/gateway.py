"""The proxy's ASGI application: it serves model calls, and reports its state.

    POST  [/rollout/{id}/attempt/{id}[/agent/{name}]][/v1]/chat/completions, /completions, /responses, /embeddings
    POST  [...]/v1/messages, /messages/count_tokens
    GET   [...][/v1]/models, /models/{name}
    POST  /rollout/{id}/attempt/{id}/agl/flush      wait until the calls of an attempt are stored
    GET   /health, /agl/status

It is written to ASGI directly: a framework's routing and validation would cost as much as the rest of a call.

Clients of Anthropic may ask for the tokens of a request that is not made. Backends that speak Anthropic's messages get
the request as it is, vLLM and our engine the chat that it would become. For others the count is estimated from the
length of the text: agents use it to keep within a context, and an error would stop some. No answer is written, so
nothing is recorded, and no budget is touched.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import orjson

from agentlightning.asgi.bodies import Bodies
from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.request import ConnectionScope, Receive, Request, Send
from agentlightning.asgi.response import Response, json_response
from agentlightning.dialects import CHAT, DIALECTS, Dialect, TranslatedDialect
from agentlightning.dialects.failures import Failure, failure_of, read_json
from agentlightning.dialects.translation import Translation, UntranslatableRequest
from agentlightning.errors import AgentLightningError, NotAllowed
from agentlightning.llm_proxy.attribution import Attempts, Authenticator, Caller, Headers, Refused, Route, route_of
from agentlightning.llm_proxy.backends import Backend, BackendPool, BackendRequest, DialectNotServed, PreparedRequest
from agentlightning.llm_proxy.budgets import Budgets
from agentlightning.llm_proxy.proxied_call import ProxiedCall, failure_from, read_request, response_headers
from agentlightning.llm_proxy.recorder import Recorder
from agentlightning.llm_proxy.replay import Replays
from agentlightning.llm_proxy.upstream_request import served_model, upstream_headers

logger = logging.getLogger(__name__)


DEADLINE_SECONDS: Final = 60.0
CHARACTERS_PER_TOKEN: Final = 4
_FIRST_ERROR: Final = 400


async def count_tokens(gateway: "Gateway", route: Route, request: Request, headers: Headers) -> Response:
    """Have a backend count; never raises but at the end of the server."""
    dialect = route.dialect or CHAT
    try:
        caller = gateway.authenticator.admit(route, headers)
        await gateway.check_attempt(caller)
        async with gateway.bodies.read(request, max_bytes=gateway.settings.max_request_bytes) as body:
            requested = await gateway.bodies.parse(body, read_request)
        served = await served_model(gateway, caller.origin, requested["model"])
        call = BackendRequest(
            model=served.name,
            rollout_id="" if caller.origin is None else caller.origin.rollout_id,
            prepare=lambda backend: _prepared(backend, dialect, requested, body, headers),
            resources_id=served.resources_id,
            deadline=time.monotonic() + DEADLINE_SECONDS,
        )
        try:
            counted = await _counted_by_backend(gateway, dialect, call)
        except (DialectNotServed, UntranslatableRequest):
            counted = None
        return counted or json_response({"input_tokens": _estimate(requested)})
    except (Refused, AgentLightningError) as error:
        failure = failure_from(error)
    except Exception:  # a fault of ours: the caller learns that there was one, the log what it was
        logger.exception("The tokens of a request could not be counted.")
        failure = Failure(500, "The proxy failed to serve this call; its log says why.", None)
    return Response(failure.status, dialect.error_body(failure))


def _prepared(
    backend: Backend, dialect: Dialect, requested: dict[str, object], body: bytes, headers: Headers
) -> PreparedRequest:
    url = backend.count_url(dialect)
    if url is None:
        raise DialectNotServed(f"Backend '{backend.name}' counts no tokens.")
    if dialect.name not in backend.dialects:
        assert isinstance(dialect, TranslatedDialect)
        chat = Translation(dialect, CHAT).request(requested)
        counted = {name: chat[name] for name in ("messages", "tools") if name in chat}
        body = orjson.dumps({**counted, "model": backend.model})
    elif backend.model != requested["model"]:
        body = orjson.dumps({**requested, "model": backend.model})
    spoken = backend.serving(dialect)
    return PreparedRequest(spoken, body, stream=False, headers=upstream_headers(headers), url=url)


async def _counted_by_backend(gateway: "Gateway", dialect: Dialect, call: BackendRequest) -> Response | None:
    """The backend's answer; None if it has a tokenizer and does not say."""
    async with await gateway.backends.send(call) as response:
        body = await response.read(gateway.settings.max_response_bytes)
        if dialect.name not in response.backend.dialects:  # vLLM's tokenizer
            answer = read_json(body)
            count = answer.get("count") if isinstance(answer, dict) and response.status < _FIRST_ERROR else None
            return json_response({"input_tokens": count}) if isinstance(count, int) and count > 0 else None
        if response.status >= _FIRST_ERROR:
            body = response.backend.redacted_bytes(body)
            failure = failure_of(response.status, body, api=dialect.name)
            body = body if body.lstrip().startswith(b"{") else dialect.error_body(failure)
        return Response(response.status, body, headers=response_headers(response.headers))


def _estimate(requested: dict[str, object]) -> int:
    characters = 0
    left: list[object] = [requested.get(name) for name in ("system", "messages", "tools")]
    while left:
        value = left.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict) and value.get("type") in ("image", "document"):
            # A picture counts as 6000 characters; its bytes say little of its tokens.
            characters += 6000
        elif isinstance(value, dict):
            left += value.values()
    return characters // CHARACTERS_PER_TOKEN + 1


# ---------------------------------------------------------------------- routes


FLUSH_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """What a proxy serves with, for as long as it lives."""

    authenticator: Authenticator
    budgets: Budgets
    deadline_seconds: float
    num_retries: int = 0
    replays: bool = False
    raw_spans: bool = False
    middlewares: Sequence[Callable[[Any], Any]] = ()
    max_request_bytes: int = 64 * 1024**2
    max_response_bytes: int = 32 * 1024**2
    asks_for_ids: bool = True
    asks_for_logprobs: bool = True


class Gateway:
    """Serves the calls of one proxy. Lives in one event loop."""

    def __init__(self, backends: BackendPool, recorder: Recorder, *, settings: GatewaySettings) -> None:
        self.backends = backends
        self.recorder = recorder
        self.settings = settings
        self.authenticator = settings.authenticator
        self.budgets = settings.budgets
        self.replays = Replays(recorder.store) if settings.replays else None
        self.attempts = Attempts(recorder.store)
        self.plain_backends: set[str] = set()
        """Names of backends that refuse requests with fields they do not know."""
        self.overridden_fields: set[tuple[str, str]] = set()
        """Models and fields of their calls that were overridden, which is logged once for each."""
        self.bodies = Bodies()
        self._callers = CallerCheck(has_key=self.authenticator.is_locked)
        self._started = time.monotonic()

    def note_unattributed(self, path: str) -> None:
        """A call came that belongs to no rollout."""
        self.recorder.unattributed += 1
        if self.recorder.unattributed == 1:
            logger.warning(
                "A model call at '%s' names no rollout, so it is served and not recorded; use the endpoint of "
                "as_resource(rollout_id, attempt_id), or the key of an attempt. Further ones are counted only.",
                path,
            )

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        request = Request(scope, receive)
        route = route_of(request.raw_path.decode("latin-1"))
        headers: Headers = dict(scope["headers"])
        try:
            self._callers.check(scope)
            if route.dialect is not None and not route.is_count and scope["method"] == "POST":
                await ProxiedCall(self, route, request, headers, send).run()
                return
            response = await self._other(request, route, headers)
        except NotAllowed as error:
            response = _failed(route, Failure(error.http_status, str(error), "permission_error"))
        except Refused as refusal:
            response = _failed(route, refusal.failure)
        if scope["method"] == "HEAD":
            response = Response(response.status, b"", headers=response.headers)
        await response.send(send)

    async def check_attempt(self, caller: Caller) -> None:
        """Demand an attempt that runs, where a key must be of one or a budget is kept for each rollout.

        A key ends with its attempt; and whoever could name no rollout, or any, would have no budget. The proxy's own
        key does without.
        """
        is_locked = self.authenticator.is_locked
        if caller.is_trusted or not (is_locked or self.budgets.per_rollout.is_limited):
            return
        origin = caller.origin
        facts = None if origin is None else await self.attempts.facts(origin)
        if facts is not None and facts.is_running:
            return
        state = "is not known here" if facts is None or not facts.is_known else "is over"
        if is_locked:
            message = f"The attempt of this key {state}; the key is void."
            message = "This key names no attempt." if origin is None else message
            raise Refused(Failure(401, message, "authentication_error"))
        reason = "this call names no rollout"
        if origin is not None:
            reason = f"attempt '{origin.attempt_id[:80]}' of rollout '{origin.rollout_id[:80]}' {state}"
        message = (
            f"This proxy has a budget for each rollout, and {reason}; call at /rollout/ROLLOUT_ID/attempt/ATTEMPT_ID/v1"
            " of an attempt that runs, or start the proxy with an API key and show that."
        )
        raise Refused(Failure(403, message, "permission_error", code="no_rollout"))

    # ------------------------------------------------------------------ what is not a model call

    async def _other(self, request: Request, route: Route, headers: Headers) -> Response:
        path, method = route.path, request.scope["method"]
        is_get = method in ("GET", "HEAD")
        if path in ("/health", "/health/liveliness", "/health/readiness") and is_get:
            return json_response({"status": "ok"})
        if route.is_count and method == "POST":
            return await count_tokens(self, route, request, headers)
        caller = self.authenticator.admit(route, headers)
        if path.startswith("/models") and is_get:
            spoken = next((one for one in DIALECTS.values() if one.client_header in headers), CHAT)
            return self._models(unquote(path.removeprefix("/models")), spoken)
        if path == "/agl/status" and is_get:
            if self.authenticator.is_locked and not caller.is_trusted:
                message = "The proxy's state, with the addresses of its backends, is shown to its own key alone."
                raise Refused(Failure(403, message, "permission_error"))
            return json_response(self.status())
        if path == "/agl/flush" and method == "POST" and caller.origin is not None:
            is_complete = await self.recorder.flush(caller.origin, timeout=FLUSH_SECONDS)
            counts = self.recorder.counts_of(caller.origin)
            return json_response(
                {
                    "is_complete": is_complete and not counts.lost,
                    "stored": counts.stored,
                    "waiting": counts.waiting,
                    "in_flight": counts.in_flight,
                    "lost": dict(counts.lost),
                }
            )
        if route.dialect is not None:
            raise Refused(Failure(405, f"'{path}' takes POST, not {method}.", "invalid_request_error"))
        raise Refused(Failure(404, f"There is nothing at '{path}'; see the list of routes in the documentation.", None))

    def _models(self, place: str, dialect: Dialect) -> Response:
        """The list of models, or the one that is named behind a slash."""
        names = self.backends.models()
        if not place:
            return json_response(dialect.model_list(names))
        name = place.removeprefix("/")
        if name not in names:
            known = ", ".join(names) or "none"
            raise Refused(Failure(404, f"There is no model '{name}'; known are: {known}.", None, "model_not_found"))
        return json_response(dialect.described_model(name))

    def status(self) -> dict[str, Any]:
        """Backends, calls and budgets of the proxy."""
        totals, run = self.recorder.totals, self.budgets.of_run
        return {
            "uptime_seconds": time.monotonic() - self._started,
            "calls": {
                "in_flight": totals.in_flight,
                "waiting_for_store": totals.waiting,
                "stored": totals.stored,
                "lost": dict(totals.lost),
                "unattributed": self.recorder.unattributed,
            },
            "spent": {"calls": run.calls, "tokens": run.tokens, "cost": run.cost} if self.budgets.is_limited else None,
            "backends": self.backends.describe(),
        }


def _failed(route: Route, failure: Failure) -> Response:
    return Response(failure.status, (route.dialect or CHAT).error_body(failure))
