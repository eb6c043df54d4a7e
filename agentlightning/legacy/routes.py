"""Routes of the v0.1 protocol: a few lines each between HTTP and the data store of a server.

Every request is checked first: its caller, its token, the size of its body. Clients may compress what they post: every
answer offers it with the response header `Accept-Encoding` of RFC 7694. A malformed request is answered with 400, a
server that has not started or has stopped with 503; both say why under `detail`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Response
from fastapi import Request as FastAPIRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.middleware.gzip import GZipMiddleware

from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.compression import COMPRESS_FROM_BYTES
from agentlightning.asgi.request import ConnectionScope, Disconnected, Message, Receive, Request, Send
from agentlightning.asgi.response import error_response, with_nosniff
from agentlightning.errors import AgentLightningError, NotAllowed
from agentlightning.legacy.data_store import ServerDataStore, check_sendable
from agentlightning.store.http.service import BODY_TIMEOUT_SECONDS
from agentlightning.store.http.tokens import admit
from agentlightning.types import (
    GenericResponse,
    NamedResources,
    ResourcesUpdate,
    RolloutLegacy,
    RolloutMode,
    TaskIfAny,
    TaskInput,
)
from agentlightning.utils.json_values import JsonObject

__all__ = ["MAX_WAIT_SECONDS", "add_routes"]

ResultT = TypeVar("ResultT")

MAX_WAIT_SECONDS: Final = 60.0
"""Longest time a request may wait for new resources."""
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Largest body, packed and unpacked."""
_OFFER: Final = (b"accept-encoding", b"gzip")
_UNPACKED: Final = (b"content-encoding", b"content-length")
"""Headers that describe a body as it was sent."""
_RUNNERS_POSTS: Final = ("/rollout", "/rollouts")

router = APIRouter()


def add_routes(app: FastAPI, *, token: str | None = None) -> None:
    """Give an application all routes; `app.state.data_store` is None until the server has started."""
    app.state.data_store = None
    app.state.stopping = asyncio.Event()
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(AgentLightningError, _refused)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESS_FROM_BYTES)
    app.add_middleware(CheckedRequests, token=token)


class CheckedRequests:
    """Middleware that checks the caller and the token of a request, and limits and unpacks its body."""

    def __init__(self, app: Any, *, token: str | None = None) -> None:
        self._app = app
        self._token = token
        self._callers = CallerCheck(has_key=token is not None)

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_offer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), _OFFER]}
            await send(message)

        request = Request(scope, receive)
        try:
            self._callers.check(scope)
            self._check_token(request)
            if scope["method"] == "POST":
                scope, receive = await _with_whole_body(request)
        except Disconnected:
            return
        except AgentLightningError as error:
            await error_response(error).send(send_with_offer)
        else:
            await self._app(scope, receive, with_nosniff(send_with_offer))

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        permitted = admit(self._token, request.header(b"authorization"))
        method, path = request.scope["method"], request.scope["path"]
        is_for_runners = method == "GET" or path in _RUNNERS_POSTS
        if permitted.kind != "admin" and not (permitted.kind == "runner" and is_for_runners):
            raise NotAllowed(f"A token of scope {permitted} does not permit {method} {path}; use the master token.")


async def _with_whole_body(request: Request) -> tuple[ConnectionScope, Receive]:
    """A request whose body was read: its scope, and what hands the body out."""
    body = await request.body(max_bytes=MAX_BODY_BYTES, timeout_seconds=BODY_TIMEOUT_SECONDS)
    kept = [(name, value) for name, value in request.scope["headers"] if name not in _UNPACKED]
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await request.receive()

    return {**request.scope, "headers": [*kept, (b"content-length", b"%d" % len(body))]}, receive


async def _malformed(request: FastAPIRequest, error: Exception) -> Response:
    """400 with what is wrong where; the input is not repeated, for it may be what JSON cannot hold."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in error.errors()]
    return JSONResponse({"detail": detail}, 400)


async def _refused(request: FastAPIRequest, error: Exception) -> Response:
    assert isinstance(error, AgentLightningError)
    return JSONResponse({"detail": str(error)}, error.http_status)


def _running(request: FastAPIRequest) -> ServerDataStore:
    data_store: ServerDataStore | None = request.app.state.data_store
    if data_store is None:
        raise HTTPException(503, "The server is not initialised; wait until it has started.")
    return data_store


DataStore = Annotated[ServerDataStore, Depends(_running)]


# ---------------------------------------------------------------------- tasks


class Submission(BaseModel):
    """A task to be queued."""

    sample: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    metadata: JsonObject | None = None


@router.get("/task")
async def next_task(request: FastAPIRequest) -> TaskIfAny:
    """Claim the next task; tasks whose claim has run out of time are back in the queue before it is served."""
    data_store: ServerDataStore | None = request.app.state.data_store
    if data_store is None:
        return TaskIfAny(is_available=False)
    await data_store.forget_stale_tasks()
    host = request.client.host if request.client else "unknown"
    task = await data_store.get_next_task(f"legacy-{host}")
    return TaskIfAny(is_available=task is not None, task=task)


@router.post("/task")
async def submit_task(task: Submission, data_store: DataStore) -> dict[str, str]:
    """Queue a task."""
    return {"rollout_id": await data_store.add_task(task.sample, task.mode, task.resources_id, task.metadata)}


# ---------------------------------------------------------------------- resources


class Publication(BaseModel):
    """Resources to be published."""

    resources: NamedResources


@router.get("/resources/latest", response_model=ResourcesUpdate)
async def latest_resources(
    request: FastAPIRequest,
    data_store: DataStore,
    after: str | None = None,
    version: int | None = None,
    wait: Annotated[float, Query(ge=0.0)] = 0.0,
) -> ResourcesUpdate | Response:
    """What was published last; 404 if nothing was.

    With `wait`, the answer comes as soon as the latest resources are not those of the id `after` in that `version`, or
    with 204 after that many seconds.
    """
    if wait > 0.0:
        coming = data_store.wait_for_resources(after, version)
        changed = await _until_stopped(coming, request.app.state.stopping, min(wait, MAX_WAIT_SECONDS))
        if changed is not None:
            return changed
    latest = await data_store.get_latest_resources()
    if latest is None:
        raise HTTPException(404, "No resources have been set; publish some with update_resources.")
    return Response(status_code=204) if wait > 0.0 else latest


async def _until_stopped(
    coming: Coroutine[Any, Any, ResultT], stopping: asyncio.Event, seconds: float
) -> ResultT | None:
    """What is coming, or None if it does not come in time or the server stops."""
    work, stop = asyncio.create_task(coming), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({work, stop}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        stop.cancel()
        await asyncio.wait({work, stop})
    return None if work.cancelled() else work.result()


@router.get("/resources/{resource_id}")
async def resources_by_id(resource_id: str, data_store: DataStore) -> ResourcesUpdate:
    """Resources by their id."""
    update = await data_store.get_resources_by_id(resource_id)
    if update is None:
        raise HTTPException(404, f"Resources with ID '{resource_id}' not found; ask for /resources/latest.")
    return update


@router.post("/resources")
async def publish_resources(publication: Publication, data_store: DataStore) -> ResourcesUpdate:
    """Publish resources; they become the latest."""
    return await data_store.publish_resources(publication.resources)


# ---------------------------------------------------------------------- results


@router.post("/rollout")
async def report_rollout(rollout: RolloutLegacy, data_store: DataStore) -> GenericResponse:
    """Keep a result."""
    await data_store.store_rollout(rollout)
    return GenericResponse(status="ok", message=f"Rollout {rollout.rollout_id} received and stored.")


@router.post("/rollouts")
async def report_rollouts(rollouts: list[RolloutLegacy], data_store: DataStore) -> GenericResponse:
    """Keep several results, in order; none of them if one is malformed."""
    check_sendable("A result", [rollout.model_dump() for rollout in rollouts])
    for rollout in rollouts:
        await data_store.store_rollout(rollout)
    rollout_ids = [rollout.rollout_id for rollout in rollouts]
    return GenericResponse(
        status="ok", message=f"{len(rollouts)} rollouts received and stored.", data={"rollout_ids": rollout_ids}
    )


@router.get("/health")
async def health(data_store: DataStore) -> GenericResponse:
    """Whether the server is ready and its store can be written to, else 503; claims nothing."""
    await data_store.check_health()
    return GenericResponse(status="ok")
