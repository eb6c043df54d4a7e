"""The v0.1 protocol over HTTP: a few lines each between a request and the data store of a server.

GET   /task, /resources/latest, /resources/{resource_id}, /health
POST  /task, /tasks, /resources, /rollout, /rollouts

Every request is checked first: its caller, its token, the size of its body, which may be compressed. A malformed one
is answered with 400, a server that has not started or has stopped with 503; both say why under `detail`.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentlightning.asgi.bodies import LARGE_BYTES, Bodies
from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.request import ConnectionScope, Disconnected, Receive, Request, Send
from agentlightning.asgi.response import Response, error_response, json_response
from agentlightning.asgi.routes import RouteTable
from agentlightning.errors import AgentLightningError, NotAllowed, NotFound, StoreUnavailable
from agentlightning.legacy.data_store import ServerDataStore, check_sendable
from agentlightning.store.http.credentials import AnswerCredentials
from agentlightning.store.http.service import BODY_TIMEOUT_SECONDS
from agentlightning.store.http.tokens import Scope, admit
from agentlightning.types import GenericResponse, NamedResources, RolloutLegacy, RolloutMode, TaskIfAny, TaskInput
from agentlightning.utils.json_values import JsonObject

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Largest body, packed and unpacked."""
_RUNNERS_POSTS: Final = ("/rollout", "/rollouts")


class Submission(BaseModel):
    """A task to be queued."""

    sample: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    metadata: JsonObject | None = None


class Publication(BaseModel):
    """Resources to be published."""

    resources: NamedResources


_SUBMISSIONS: Final = TypeAdapter(list[Submission])
_ROLLOUTS: Final = TypeAdapter(list[RolloutLegacy])


@dataclass(frozen=True)
class Call:
    """One request to a server that has started."""

    store: ServerDataStore
    body: bytes
    scope: Scope
    """On whose behalf the caller speaks."""
    host: str
    """Where it is."""
    credentials: AnswerCredentials

    async def next_task(self) -> Response:
        """Claim the next task; tasks whose claim has run out of time are back in the queue before it is served."""
        await self.store.forget_stale_tasks()
        task = await self.store.get_next_task(f"legacy-{self.host}")
        if task is not None and self.scope.kind != "admin":
            task = await self.store.with_resources_of_attempt(task)
        return _written(TaskIfAny(is_available=task is not None, task=task))

    async def submit_task(self) -> Response:
        """Queue a task."""
        ids = await self._submit([Submission.model_validate_json(self.body)])
        return json_response({"rollout_id": ids[0]})

    async def submit_tasks(self) -> Response:
        """Queue several tasks, in order; none of them if one is malformed."""
        return json_response({"rollout_ids": await self._submit(_SUBMISSIONS.validate_json(self.body))})

    async def _submit(self, tasks: Sequence[Submission]) -> list[str]:
        check_sendable("A task", [task.model_dump() for task in tasks])
        return [await self.store.add_task(**dict(task)) for task in tasks]

    async def resources(self, resource_id: str) -> Response:
        """Resources by their id, or what was published last; 404 if there are none."""
        if resource_id == "latest":
            update = await self.store.get_latest_resources()
        else:
            known = await self.store.get_resources_by_id(resource_id)
            update = known or await self.store.resources_of_attempt(resource_id)
        if update is None:
            raise NotFound(f"Resources '{resource_id}' not found; publish some with update_resources.")
        return _written(await self.credentials.shown_to(self.scope, update))

    async def publish_resources(self) -> Response:
        """Publish resources; they become the latest."""
        publication = Publication.model_validate_json(self.body)
        return _written(await self.store.publish_resources(publication.resources))

    async def report_rollout(self) -> Response:
        """Keep a result."""
        rollout = RolloutLegacy.model_validate_json(self.body)
        await self.store.store_rollout(rollout)
        return _written(GenericResponse(status="ok", message=f"Rollout {rollout.rollout_id} received and stored."))

    async def report_rollouts(self) -> Response:
        """Keep several results, in order; none of them if one is malformed."""
        rollouts = _ROLLOUTS.validate_json(self.body)
        check_sendable("A result", [rollout.model_dump() for rollout in rollouts])
        for rollout in rollouts:
            await self.store.store_rollout(rollout)
        data = {"rollout_ids": [rollout.rollout_id for rollout in rollouts]}
        return _written(
            GenericResponse(status="ok", message=f"{len(rollouts)} rollouts received and stored.", data=data)
        )

    async def health(self) -> Response:
        """Whether the server is ready and its store can be written to, else 503; claims nothing."""
        await self.store.check_health()
        return _written(GenericResponse(status="ok"))


class LegacyApp:
    """The ASGI application; `data_store` is None until the server has started."""

    def __init__(self, *, token: str | None = None) -> None:
        self.data_store: ServerDataStore | None = None
        self._token = token
        self._callers = CallerCheck(has_key=token is not None)
        self._bodies = Bodies()
        self._routes: RouteTable[Callable[..., Awaitable[Response]]] = RouteTable()
        for verb, path, endpoint in (
            ("GET", "/task", Call.next_task),
            ("POST", "/task", Call.submit_task),
            ("POST", "/tasks", Call.submit_tasks),
            ("GET", "/resources/{resource_id}", Call.resources),
            ("POST", "/resources", Call.publish_resources),
            ("POST", "/rollout", Call.report_rollout),
            ("POST", "/rollouts", Call.report_rollouts),
            ("GET", "/health", Call.health),
        ):
            self._routes.add(verb, path, endpoint)

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            self._callers.check(scope)
            response = await self._respond(request, self._checked_scope(request))
        except Disconnected:
            return
        except ValidationError as error:  # what is wrong where; the input is not repeated
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            response = json_response({"detail": problems}, 400)
        except AgentLightningError as error:
            response = error_response(error)
        await response.send(send, accept_encoding=request.header(b"accept-encoding"))

    def _checked_scope(self, request: Request) -> Scope:
        """On whose behalf the caller speaks; refuses what that does not permit."""
        if self._token is None:
            return Scope("admin")
        permitted = admit(self._token, request.header(b"authorization"))
        method, path = request.scope["method"], request.scope["path"]
        is_for_runners = method == "GET" or path in _RUNNERS_POSTS
        if permitted.kind != "admin" and not (permitted.kind == "runner" and is_for_runners):
            raise NotAllowed(f"A token of scope {permitted} does not permit {method} {path}; use the master token.")
        return permitted

    async def _respond(self, request: Request, permitted: Scope) -> Response:
        verb = request.scope["method"]
        found = self._routes.find(verb, request.raw_path)
        if found is None:
            allowed = ", ".join(self._routes.verbs(request.raw_path))
            text, status = ("Method Not Allowed", 405) if allowed else ("Not Found", 404)
            return json_response({"detail": text}, status, [(b"allow", allowed.encode())] if allowed else [])
        endpoint, values = found
        max_bytes = 0 if verb == "GET" else MAX_BODY_BYTES if permitted.kind == "admin" else LARGE_BYTES
        async with self._bodies.read(request, max_bytes=max_bytes, timeout_seconds=BODY_TIMEOUT_SECONDS) as body:
            await self._bodies.parse(body, lambda body: None)  # it may hold too many values
            if self.data_store is not None:
                host = (request.scope.get("client") or ["unknown"])[0]
                credentials = AnswerCredentials(self.data_store.store, self._token)
                return await endpoint(Call(self.data_store, body, permitted, host, credentials), **values)
        if endpoint is Call.next_task:
            return _written(TaskIfAny(is_available=False))
        raise StoreUnavailable("The server is not initialised; wait until it has started.")


def _written(answer: BaseModel) -> Response:
    return Response(200, answer.model_dump_json().encode())
