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

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import orjson

from agentlightning.asgi.bodies import Bodies
from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.request import ConnectionScope, Receive, Request, Send
from agentlightning.asgi.response import Response, json_response
from agentlightning.dialects import CHAT, DIALECTS, Dialect, TranslatedDialect
from agentlightning.dialects.base import Translation, UntranslatableRequest
from agentlightning.dialects.failures import Failure, failure_of, read_json
from agentlightning.errors import AgentLightningError, NotAllowed
from agentlightning.llm_proxy.answers import FIRST_ERROR, failure_from, response_headers
from agentlightning.llm_proxy.attribution import (
    Attempts,
    Authenticator,
    Caller,
    Headers,
    Refused,
    Route,
    read_request,
    request_headers,
    route_of,
)
from agentlightning.llm_proxy.backends import Backend, BackendCall, BackendPool, DialectNotServed, PreparedRequest
from agentlightning.llm_proxy.budgets import Budgets
from agentlightning.llm_proxy.proxied_call import ProxiedCall
from agentlightning.llm_proxy.recorder import Origin, Recorder
from agentlightning.llm_proxy.replay import Replays
from agentlightning.store.base import LightningStore
from agentlightning.utils.once import fork_handlers
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

logger = logging.getLogger(__name__)


COUNT_SECONDS: Final = 60.0
CHARACTERS_PER_TOKEN: Final = 4
FLUSH_SECONDS: Final = 10.0
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than pooled clients keep a connection, so that they close it first and never write into a closed one."""
STOP_SECONDS: Final = 10.0
"""Within which it must have stopped to serve; calls in flight get half of it to finish."""


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
    """One running proxy: made, started and stopped in the event loop that serves."""

    def __init__(
        self, settings: GatewaySettings, store: LightningStore, model_list: Sequence[Any], *, host: str, port: int
    ) -> None:
        self.settings = settings
        self.backends = BackendPool(
            model_list, num_retries=settings.num_retries, deadline_seconds=settings.deadline_seconds
        )
        self.recorder = Recorder(store, raw_spans=settings.raw_spans)
        self.authenticator = settings.authenticator
        self.budgets = settings.budgets
        self.replays = Replays(store) if settings.replays else None
        self.attempts = Attempts(store)
        self.plain_backends: set[str] = set()
        """Names of backends that refuse requests with fields they do not know."""
        self.overridden_fields: set[tuple[str, str]] = set()
        """Models and fields of their calls that were overridden, which is logged once for each."""
        self.bodies = Bodies()
        self._callers = CallerCheck(has_key=self.authenticator.is_locked)
        self._started = time.monotonic()
        app: Any = self
        for middleware in settings.middlewares:
            app = middleware(app)
        arguments = PythonServerLauncherArgs(
            host=host, port=port, timeout_keep_alive=KEEP_ALIVE_SECONDS, thread_join_timeout=STOP_SECONDS
        )
        self._launcher = PythonServerLauncher(app, arguments)
        self._cleanup = contextlib.AsyncExitStack()
        self._listening: list[int] = []

    # ------------------------------------------------------------------ life

    @property
    def port(self) -> int:
        return self._launcher.port

    @property
    def is_serving(self) -> bool:
        return self._launcher.is_running()

    async def start(self) -> None:
        """Serve; RuntimeError if the port is taken."""
        try:
            await self._cleanup.enter_async_context(self.recorder.running())
            self._cleanup.push_async_callback(self.backends.close)
            await self._launcher.start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        self._cleanup.push_async_callback(self.stop_serving)
        servers = [] if self._launcher.server is None else self._launcher.server.servers
        self._listening = [listening.fileno() for server in servers for listening in server.sockets]
        fork_handlers().add(self, Gateway._close_in_child)

    def _close_in_child(self) -> None:
        """A forked child must not keep the port taken after its parent has stopped."""
        while self._listening:
            with contextlib.suppress(OSError):
                os.close(self._listening.pop())

    async def stop_serving(self) -> None:
        """Finish the calls in flight and free the port. Those that take longer than a few seconds are cut."""
        self._listening.clear()
        await self._launcher.stop()

    async def close(self) -> None:
        """Stop to serve, and store what the calls have left."""
        await asyncio.shield(self._cleanup.aclose())

    async def replace_models(self, model_list: Sequence[Any]) -> None:
        """Replace the backends; calls in flight finish on the old ones."""
        self.plain_backends &= self.backends.replace(model_list)

    # ------------------------------------------------------------------ calls

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

    async def resolve(self, call: BackendCall, origin: Origin | None, requested: str) -> Mapping[str, Any]:
        """Name the model that serves a call, and the resources it is pinned to; returns fields that replace its own.

        What the resources give to an agent that names itself comes before the requested model.
        """
        overrides: Mapping[str, Any] = {}
        call.model = requested
        if origin is None:
            return overrides
        llm = None if origin.agent is None else await self.attempts.llm_of(origin)
        if llm is not None:
            call.model, overrides = llm.model, llm.sampling_parameters
        if self.backends.is_versioned(call.model):
            facts = await self.attempts.facts(origin)
            call.resources_id = None if facts.rollout is None else facts.rollout.resources_id
        return overrides

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
            return await TokenCount(self, route, request, headers).answer()
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

    async def reported_status(self) -> dict[str, Any]:
        """The status, read in the loop, where the counts do not change meanwhile."""
        return self.status()

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


# ---------------------------------------------------------------------- counts of tokens


class TokenCount(BackendCall):
    """A request whose tokens a backend counts, and that is not made."""

    def __init__(self, gateway: Gateway, route: Route, request: Request, headers: Headers) -> None:
        super().__init__()
        self._gateway = gateway
        self._route = route
        self._dialect = route.dialect or CHAT
        self._request = request
        self._headers = headers
        self._requested: dict[str, Any] = {}
        self._body = b""

    async def answer(self) -> Response:
        """Have a backend count; never raises but at the end of the server."""
        gateway = self._gateway
        try:
            caller = gateway.authenticator.admit(self._route, self._headers)
            await gateway.check_attempt(caller)
            async with gateway.bodies.read(self._request, max_bytes=gateway.settings.max_request_bytes) as self._body:
                self._requested = await gateway.bodies.parse(self._body, read_request)
            self.rollout_id = "" if caller.origin is None else caller.origin.rollout_id
            self.deadline = time.monotonic() + COUNT_SECONDS
            await gateway.resolve(self, caller.origin, self._requested["model"])
            try:
                counted = await self._counted_by_backend()
            except (DialectNotServed, UntranslatableRequest):
                counted = None
            return counted or json_response({"input_tokens": _estimate(self._requested)})
        except (Refused, AgentLightningError) as error:
            failure = failure_from(error)
        except Exception:  # a fault of ours: the caller learns that there was one, the log what it was
            logger.exception("The tokens of a request could not be counted.")
            failure = Failure(500, "The proxy failed to serve this call; its log says why.", None)
        return Response(failure.status, self._dialect.error_body(failure))

    def prepare(self, backend: Backend) -> PreparedRequest:
        url, dialect, body = backend.count_url(self._dialect), self._dialect, self._body
        if url is None:
            raise DialectNotServed(f"Backend '{backend.name}' counts no tokens.")
        if dialect.name not in backend.dialects:
            assert isinstance(dialect, TranslatedDialect)
            chat = Translation(dialect, CHAT).request(self._requested)
            counted = {name: chat[name] for name in ("messages", "tools") if name in chat}
            body = orjson.dumps({**counted, "model": backend.model})
        elif backend.model != self._requested["model"]:
            body = orjson.dumps({**self._requested, "model": backend.model})
        return PreparedRequest(url, body, request_headers(self._headers))

    async def _counted_by_backend(self) -> Response | None:
        """The backend's answer; None if it has a tokenizer and does not say."""
        async with await self._gateway.backends.send(self) as response:
            body = await response.read(self._gateway.settings.max_response_bytes)
        if self._dialect.name not in response.backend.dialects:  # vLLM's tokenizer
            answer = read_json(body)
            count = answer.get("count") if isinstance(answer, dict) and response.status < FIRST_ERROR else None
            return json_response({"input_tokens": count}) if isinstance(count, int) and count > 0 else None
        if response.status >= FIRST_ERROR:
            body = response.backend.redacted_bytes(body)
            failure = failure_of(response.status, body, api=self._dialect.name)
            body = body if body.lstrip().startswith(b"{") else self._dialect.error_body(failure)
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
