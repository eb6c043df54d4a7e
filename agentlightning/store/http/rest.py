"""REST: a plain ASGI layer that serves the store's routes and passes the rest on to the web framework.

A request is checked before its body is read: the page that sent it, its token, and whether that permits the operation.
Whose attempt it is about is checked by the service once the arguments are known.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

from agentlightning.asgi.answers import kind_of
from agentlightning.asgi.bodies import SMALL_BYTES
from agentlightning.asgi.protocol import Outbox
from agentlightning.asgi.request import Disconnected, Message, Receive, Request, Send
from agentlightning.asgi.response import LargeResponse, Response, with_nosniff
from agentlightning.store.http.codec import is_deep, parse_foreign_json, too_deep
from agentlightning.store.http.failures import FailureReply, failure_of
from agentlightning.store.http.live import serve_live
from agentlightning.store.http.otlp import JSON, encode_answer, ingest_traces, read_traces
from agentlightning.store.http.otlp_messages import format_of
from agentlightning.store.http.routes import (
    DEFAULT_QUERY_LIMIT,
    GONE_PATHS,
    LIVE_PATH,
    NOTICES_PATH,
    PREFIX,
    RestRoute,
    route_table,
)
from agentlightning.store.http.service import Caller, StoreService, is_page
from agentlightning.store.http.tokens import check_server_page, check_traces
from agentlightning.store.operations import ALL_ITEMS

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
_NOT_FOUND, _METHOD_NOT_ALLOWED, _GONE = 404, 405, 410
_LEGACY_REFUSAL = (
    "This server is a store, and does not speak the first release's protocol of tasks; run the agent with `agl runner "
    "MODULE:AGENT --store URL`, as training with VERL needs it, or have it poll an AgentLightningServer."
)
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
        began, outbox = time.perf_counter(), Outbox(request.scope)
        status = 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            async with AsyncExitStack() as memory:
                response = await self._respond(request, watched_send, memory)
                encoding = request.header(b"accept-encoding")
                if isinstance(response, LargeResponse):
                    answers = self._service.answers
                    await response.send(
                        watched_send, accept_encoding=encoding, answers=answers, outbox=outbox, memory=memory
                    )
                elif response is not None:
                    await response.send(watched_send, accept_encoding=encoding)
                del response  # its body has been written, and need not be kept twice
                if outbox.unsent_bytes() > SMALL_BYTES:
                    await self._service.answers.until_read(outbox.unsent_bytes)
        except Disconnected:
            await outbox.abort()
        finally:
            if logger.isEnabledFor(logging.DEBUG):
                host, port = request.scope.get("client") or ("?", 0)
                milliseconds = (time.perf_counter() - began) * 1000
                method, path = request.scope["method"], request.scope["path"]
                logger.debug("%s:%s %s %r %s %.1f ms", host, port, method, path, status, milliseconds)

    async def _respond(self, request: Request, send: Send, memory: AsyncExitStack) -> Response | LargeResponse | None:
        """The answer of a route of ours, or to a request that is refused; None once the framework has answered.

        Args:
            memory: Left when the answer has been sent.
        """
        scope = request.scope
        is_read = scope["method"] in ("GET", "HEAD")
        try:
            self._service.callers.check(scope)
            is_public = is_read and is_page(scope["path"])
            caller = self._service.caller(None if is_public else request.header(b"authorization"))
            response = await self._routed(request, caller, memory)
            if response is None:
                if is_read:
                    check_server_page(caller.scope, scope["path"])
                await self._app(scope, request.receive, with_nosniff(send))
            return response
        except Disconnected:
            raise
        except Exception as error:  # noqa: BLE001 # the boundary: whatever happened, the client is told
            return failure_of(error).response()

    async def _routed(
        self, request: Request, caller: Caller, memory: AsyncExitStack
    ) -> Response | LargeResponse | None:
        """The answer of a route of ours; None if the path is none of ours."""
        path, verb = request.scope["path"], request.scope["method"]
        found = route_table().find(verb, request.raw_path)
        if found is not None:
            return await self._operation(request, caller, memory, *found)
        if path == TRACES_PATH and verb == "POST":
            return await self._traces(request, caller)
        if path == NOTICES_PATH and verb == "GET":
            reading = self._service.read_notices(caller.scope, request.query)
            return Response(200, await request.unless_disconnected(reading))
        if verbs := route_table().verbs(request.raw_path):
            detail = f"{path} does not take {verb}, only {' and '.join(verbs)}."
            allow = (b"allow", ", ".join(verbs).encode())
            return FailureReply(_METHOD_NOT_ALLOWED, "MethodNotAllowed", detail).response([allow])
        if path.startswith(PREFIX + "/") and path != PREFIX + "/health":
            return FailureReply(_NOT_FOUND, "UnknownRoute", f"There is no route {path}; see /docs.").response()
        if path == "/task":
            return FailureReply(_GONE, "LegacyProtocol", _LEGACY_REFUSAL).response()
        if path.split("/")[1] in GONE_PATHS:
            detail = f"{path} was a route of 0.2; the routes of this server are under {PREFIX}, see /docs."
            return FailureReply(_GONE, "UnknownRoute", detail).response()
        return None

    async def _operation(
        self, request: Request, caller: Caller, memory: AsyncExitStack, route: RestRoute, in_path: dict[str, str]
    ) -> Response | LargeResponse:
        op, service = route.codec.op, self._service
        call = caller.call_of(route.codec)
        async with AsyncExitStack() as received:
            body = b"" if route.verb == "GET" else await received.enter_async_context(self._body(request, caller))
            parsed = await service.bodies.parse(body, parse_foreign_json) if body else None
            given = route.arguments(in_path, request.query, parsed)
            if op.mutates and is_deep(body, given):
                raise too_deep()
            is_limited = route.is_query and "limit" not in given
            if is_limited:
                given["limit"] = DEFAULT_QUERY_LIMIT
            kind = kind_of(op.name, given)
            if op.is_query:
                await memory.enter_async_context(service.answers.room_for(kind))
            calling = call(given)
            if op.may_wait(given):
                await received.aclose()
                calling = request.unless_disconnected(calling)
            result = await calling
            if is_limited and result.total <= DEFAULT_QUERY_LIMIT:
                result.limit = ALL_ITEMS
        briefly = _BRIEFLY in request.header(b"prefer").replace(" ", "").split(",")
        response = route.respond(result, briefly=briefly)
        if not op.is_query:
            return response
        if isinstance(response, LargeResponse):
            return LargeResponse(response.status, _counted(response.parts, partial(service.answers.count, kind)))
        service.answers.count(kind, len(response.body))
        await memory.aclose()
        return response

    async def _traces(self, request: Request, caller: Caller) -> Response:
        media_type = request.header(b"content-type").split(";")[0].strip().lower()
        check_traces(caller.scope)
        is_json = format_of(media_type) == JSON
        async with self._body(request, caller, is_json=is_json) as body:
            if is_json:
                await self._service.bodies.parse(body, lambda body: None)
            traces = await asyncio.to_thread(read_traces, body, media_type)  # a large one takes a while
            check_traces(caller.scope, [(span.rollout_id, span.attempt_id) for span in traces.spans])
            await self._service.check_attempt(caller.scope)
            rejected = await ingest_traces(self._service.store, traces)
        return Response(200, encode_answer(media_type, rejected.count, rejected.message), media_type.encode())

    def _body(self, request: Request, caller: Caller, *, is_json: bool = True) -> AbstractAsyncContextManager[bytes]:
        service = self._service
        timeout = service.body_timeout_seconds
        return service.bodies.read(request, max_bytes=caller.max_bytes, timeout_seconds=timeout, is_json=is_json)


def _counted(parts: Iterable[bytes], count: Callable[[int], None]) -> Iterator[bytes]:
    """The parts as they are, and at each how much there was of them."""
    size = 0
    for part in parts:
        size += len(part)
        count(size)
        yield part
