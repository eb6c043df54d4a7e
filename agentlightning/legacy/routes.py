"""Routes of the v0.1 protocol: a few lines each between HTTP and the data store of a server.

A malformed request is answered with 400, a server that has not started or has stopped with 503; both say why under
`detail`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.middleware.gzip import GZipMiddleware

from agentlightning.asgi.compression import COMPRESS_FROM_BYTES
from agentlightning.errors import AgentLightningError
from agentlightning.legacy.data_store import ServerDataStore, check_sendable
from agentlightning.legacy.middleware import CheckedRequests
from agentlightning.types import (
    GenericResponse,
    NamedResources,
    ResourcesUpdate,
    RolloutLegacy,
    RolloutMode,
    TaskIfAny,
    TaskInput,
)

__all__ = ["MAX_WAIT_SECONDS", "add_routes"]

ResultT = TypeVar("ResultT")

MAX_WAIT_SECONDS = 60.0
"""Longest time a request may wait for new resources."""

router = APIRouter()


class Submission(BaseModel):
    """A task to be queued."""

    sample: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    metadata: dict[str, Any] | None = None


class Submitted(BaseModel):
    """Where a queued task can be found."""

    rollout_id: str


class Publication(BaseModel):
    """Resources to be published."""

    resources: NamedResources


class WaitingRequests:
    """Requests that wait, let go all at once when their server stops; while it is closed, none waits."""

    def __init__(self) -> None:
        self._is_open = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Send everybody away, those who come later too."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait(self, coming: Coroutine[Any, Any, ResultT], seconds: float) -> ResultT | None:
        """What is coming, or None if it does not come in time or the room closes."""
        if not self._is_open:
            coming.close()
            return None
        task = asyncio.create_task(coming, name="agl-legacy-wait")
        self._tasks.add(task)
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            self._tasks.discard(task)
            task.cancel()
            await asyncio.wait({task})
        return None if task.cancelled() else task.result()


def add_routes(app: FastAPI, *, token: str | None = None) -> None:
    """Give an application all routes; `app.state.data_store` is None until the server has started."""
    app.state.data_store = None
    app.state.waiting = WaitingRequests()
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(AgentLightningError, _refused)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESS_FROM_BYTES)
    app.add_middleware(CheckedRequests, token=token)


async def _malformed(request: Request, error: Exception) -> Response:
    """400 with what is wrong where; the input is not repeated, for it may be what JSON cannot hold."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: problem[key] for key in ("type", "loc", "msg")} for problem in error.errors()]
    return JSONResponse({"detail": detail}, 400)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AgentLightningError)
    return JSONResponse({"detail": str(error)}, error.http_status)


def _running(request: Request) -> ServerDataStore:
    data_store: ServerDataStore | None = request.app.state.data_store
    if data_store is None:
        raise HTTPException(503, "The server is not initialised; wait until it has started.")
    return data_store


DataStore = Annotated[ServerDataStore, Depends(_running)]


# ---------------------------------------------------------------------- tasks


@router.get("/task")
async def next_task(request: Request) -> TaskIfAny:
    """Claim the next task; tasks whose claim has run out of time are back in the queue before it is served."""
    data_store: ServerDataStore | None = request.app.state.data_store
    if data_store is None:
        return TaskIfAny(is_available=False)
    await data_store.forget_stale_tasks()
    host = request.client.host if request.client else "unknown"
    task = await data_store.get_next_task(f"legacy-{host}")
    return TaskIfAny(is_available=task is not None, task=task)


@router.post("/task")
async def submit_task(submission: Submission, data_store: DataStore) -> Submitted:
    """Queue a task."""
    rollout_id = await data_store.add_task(
        submission.sample, submission.mode, submission.resources_id, submission.metadata
    )
    return Submitted(rollout_id=rollout_id)


# ---------------------------------------------------------------------- resources


@router.get("/resources/latest", response_model=ResourcesUpdate)
async def latest_resources(
    request: Request,
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
        waiting: WaitingRequests = request.app.state.waiting
        changed = await waiting.wait(data_store.wait_for_resources(after, version), min(wait, MAX_WAIT_SECONDS))
        if changed is not None:
            return changed
    latest = await data_store.get_latest_resources()
    if latest is None:
        raise HTTPException(404, "No resources have been set; publish some with update_resources.")
    return Response(status_code=204) if wait > 0.0 else latest


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
