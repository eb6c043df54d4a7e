"""The routes at work: a plain ASGI layer that answers what it knows and passes the rest on.

It stands before the web framework, which serves the pages around it and describes these routes, but does not run them.
"""

import asyncio
import logging
import time
from typing import Any

from agentlightning.asgi.messages import Receive, Send, with_nosniff
from agentlightning.store.http.codec import parse_foreign_json
from agentlightning.store.http.exchange import Disconnected, Request, SlowRequest, answer
from agentlightning.store.http.failures import Failure, failure_of
from agentlightning.store.http.live import serve_live
from agentlightning.store.http.notices import read_notices
from agentlightning.store.http.otlp import encode_answer, ingest_traces, read_traces
from agentlightning.store.http.permissions import check_server_page, check_traces
from agentlightning.store.http.service import StoreService, is_page
from agentlightning.store.http.tokens import Scope
from agentlightning.store.http.wire import LIVE_PATH, NOTICES_PATH, PREFIX, WireRoute, find_route, verbs_of

__all__ = ["StoreRoutes"]

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
_METHOD_NOT_ALLOWED = 405
_BRIEFLY = "return=minimal"


class StoreRoutes:
    """ASGI middleware with every route of the store."""

    def __init__(self, app: Any, service: StoreService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and scope["path"] == LIVE_PATH:
            await serve_live(self._service, scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(Request(scope, receive), send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, request: Request, send: Send) -> None:
        began = time.perf_counter()
        status = 0

        async def watched_send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._service.callers.check(request.scope)
            permitted = self._admitted(request)
            if not await self._answered(request, watched_send, permitted):
                if request.scope["method"] in ("GET", "HEAD"):
                    check_server_page(permitted, request.scope["path"])
                await self._app(request.scope, request.receive, with_nosniff(watched_send))
        except Disconnected:
            return
        except SlowRequest as slow:
            await _refuse(request, watched_send, slow.failure)
        except Exception as error:  # noqa: BLE001 # the boundary: whatever happened, the client is told
            await _refuse(request, watched_send, failure_of(error))
        finally:
            self._log(request, status, began)

    def _admitted(self, request: Request) -> Scope:
        """Who asks; the pages are for everybody."""
        if request.scope["method"] in ("GET", "HEAD") and is_page(request.scope["path"]):
            return Scope("admin")
        return self._service.admit(request.header(b"authorization"))

    async def _answered(self, request: Request, send: Send, permitted: Scope) -> bool:
        """Serve a request if the path is one of ours."""
        path, verb = request.scope["path"], request.scope["method"]
        found = find_route(verb, request.raw_path)
        if found is not None:
            await self._serve_operation(request, send, permitted, *found)
        elif path == TRACES_PATH and verb == "POST":
            await self._serve_traces(request, send, permitted)
        elif path == NOTICES_PATH and verb == "GET":
            body = await self._unless_gone(request, read_notices(self._service, permitted, request.query))
            await answer(request, send, 200, body)
        elif verbs := verbs_of(request.raw_path):
            failure = Failure(
                _METHOD_NOT_ALLOWED, "MethodNotAllowed", f"{path} does not take {verb}, only {' and '.join(verbs)}."
            )
            allow = (b"allow", ", ".join(verbs).encode())
            await answer(request, send, failure.status, failure.body, further_headers=[allow])
        elif path.startswith(PREFIX + "/") and path != PREFIX + "/health":
            await _refuse(request, send, Failure(404, "UnknownRoute", f"There is no route {path}; see /docs."))
        else:
            return False
        return True

    async def _serve_operation(
        self, request: Request, send: Send, permitted: Scope, route: WireRoute, in_path: dict[str, str]
    ) -> None:
        body = await self._body(request)
        given = route.read(in_path, request.query, parse_foreign_json(body) if body else None)
        calling = self._service.call(route.codec, given, permitted, request.header(b"authorization"))
        result = await (self._unless_gone(request, calling) if route.codec.op.may_wait(given) else calling)
        briefly = not route.is_old and _BRIEFLY in request.header(b"prefer").replace(" ", "").split(",")
        await answer(request, send, route.status, route.write(result, briefly=briefly))

    async def _serve_traces(self, request: Request, send: Send, permitted: Scope) -> None:
        media_type = request.header(b"content-type").split(";")[0].strip().lower()
        body = await self._body(request)
        traces = await asyncio.to_thread(read_traces, body, media_type)  # a large one takes a while
        check_traces(permitted, [(span.rollout_id, span.attempt_id) for span in traces.spans])
        rejected = await ingest_traces(self._service.store, traces)
        told = encode_answer(media_type, rejected.count, " ".join(rejected.messages))
        await answer(request, send, 200, told, media_type=media_type.encode())

    async def _body(self, request: Request) -> bytes:
        service = self._service
        if request.scope["method"] == "GET":
            return b""
        return await request.body(max_bytes=service.max_request_bytes, timeout_seconds=service.body_timeout_seconds)

    async def _unless_gone(self, request: Request, calling: Any) -> Any:
        """Await a call that may wait long; end it when the client goes away."""
        call, gone = asyncio.ensure_future(calling), asyncio.ensure_future(request.until_disconnect())
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Disconnected
            return call.result()
        finally:
            for task in (call, gone):
                task.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    def _log(self, request: Request, status: int, began: float) -> None:
        if logger.isEnabledFor(logging.INFO):
            client = request.scope.get("client") or ("?", 0)
            milliseconds = (time.perf_counter() - began) * 1000
            method, path = request.scope["method"], request.scope["path"]
            logger.info("%s:%s %s %r %s %.1f ms", client[0], client[1], method, path, status, milliseconds)


async def _refuse(request: Request, send: Send, failure: Failure) -> None:
    await answer(request, send, failure.status, failure.body)
