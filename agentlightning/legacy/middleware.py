"""What the legacy server does to a request before a route sees it: check the caller, limit and unpack the body.

Clients may compress what they post: every answer offers it with the response header `Accept-Encoding` of RFC 7694.
"""

import time
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.request import Disconnected, Request
from agentlightning.asgi.response import with_nosniff
from agentlightning.errors import AgentLightningError, InvalidToken, NotAllowed
from agentlightning.store.http.service import BODY_TIMEOUT_SECONDS
from agentlightning.store.http.tokens import verify_token

__all__ = ["CheckedRequests"]

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Largest body, packed and unpacked."""
_BEARER: Final = "bearer "
_UNPACKED: Final = (b"content-encoding", b"content-length")
"""Headers that describe a body as it was sent."""
_RUNNERS_POSTS: Final = ("/rollout", "/rollouts")


class CheckedRequests:
    """Middleware around an ASGI application."""

    def __init__(self, app: ASGIApp, *, token: str | None = None) -> None:
        self._app = app
        self._token = token
        self._callers = CallerCheck(has_key=token is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_offer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["accept-encoding"] = "gzip"
            await send(message)

        sending = with_nosniff(send_with_offer)
        request = Request(scope, receive)
        try:
            self._callers.check(scope)
            self._check_token(request)
            if scope["method"] == "POST":
                scope, receive = await self._with_whole_body(request)
        except Disconnected:
            return
        except AgentLightningError as error:
            await JSONResponse({"detail": str(error)}, error.http_status)(scope, receive, sending)
        else:
            await self._app(scope, receive, sending)

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        authorization = request.header(b"authorization")
        if authorization[: len(_BEARER)].lower() != _BEARER:
            raise InvalidToken("This server wants a token; send it as 'Authorization: Bearer TOKEN'.")
        permitted = verify_token(self._token, authorization[len(_BEARER) :].strip(), time.time())
        method, path = request.scope["method"], request.scope["path"]
        is_for_runners = method == "GET" or path in _RUNNERS_POSTS
        if permitted.kind != "admin" and not (permitted.kind == "runner" and is_for_runners):
            raise NotAllowed(f"A token of scope {permitted} does not permit {method} {path}; use the master token.")

    async def _with_whole_body(self, request: Request) -> tuple[Scope, Receive]:
        body = await request.body(max_bytes=MAX_BODY_BYTES, timeout_seconds=BODY_TIMEOUT_SECONDS)
        kept = [(name, value) for name, value in request.scope["headers"] if name not in _UNPACKED]
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return dict(await request.receive())

        return {**request.scope, "headers": [*kept, (b"content-length", b"%d" % len(body))]}, receive
