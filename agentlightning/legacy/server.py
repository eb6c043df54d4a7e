"""AgentLightningServer: the algorithm's side of the v0.1 protocol, over a `LightningStore`.

Tasks queued here can be run by old clients over HTTP or by new runners over the store, and whoever ran them, their
results come back here. Serving is left to the server launcher, everything that is remembered to the data store.

GET   /task, /resources/latest, /resources/{resource_id}, /health
POST  /task, /tasks, /resources, /rollout, /rollouts

Every request is checked first: its caller, its token, the size of its body, which may be compressed. A malformed one
is answered with 400, a server that has not started or has stopped with 503; both say why under `detail`.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentlightning.asgi.bodies import LARGE_BYTES, Bodies
from agentlightning.asgi.caller import CallerCheck
from agentlightning.asgi.request import ConnectionScope, Disconnected, Receive, Request, Send
from agentlightning.asgi.response import Response, error_response, json_response
from agentlightning.asgi.routes import RouteTable
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import AgentLightningError, NotAllowed, NotFound, StoreUnavailable
from agentlightning.legacy.data_store import ServerDataStore, check_sendable
from agentlightning.store.base import LightningStore
from agentlightning.store.http.credentials import AnswerCredentials
from agentlightning.store.http.server import checked_token, warn_if_open
from agentlightning.store.http.service import BODY_TIMEOUT_SECONDS
from agentlightning.store.http.tokens import Scope, admit
from agentlightning.types import GenericResponse, NamedResources, RolloutLegacy, RolloutMode, TaskIfAny, TaskInput
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Largest body, packed and unpacked."""


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
        is_for_runners = method == "GET" or path in ("/rollout", "/rollouts")
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


class AgentLightningServer:
    """Hands out tasks and collects results over HTTP. New code uses `LightningStoreServer`."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        task_timeout_seconds: float = 300.0,
        *,
        store: LightningStore | None = None,
        token: str | None = None,
    ) -> None:
        """Prepare a server; nothing is served yet.

        Args:
            host: Address to listen on.
            port: Port to listen on; 0 takes a free one when the server starts.
            task_timeout_seconds: After this time a claimed task goes back to the queue.
            store: Where tasks, results and resources are kept; by default a memory store of its own.
            token: What callers must show; by default the environment's `AGL_STORE_TOKEN`, without which all may call.
        """
        deprecated("AgentLightningServer speaks the v0.1 protocol, which is deprecated; use LightningStoreServer.")
        self.host = host
        self.port = port
        self.loop: asyncio.AbstractEventLoop | None = None
        self.startup_event = threading.Event()
        self._task_timeout_seconds = task_timeout_seconds
        self._data_store = ServerDataStore(store, task_timeout_seconds=task_timeout_seconds)
        self._token = checked_token(resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, token))
        warn_if_open("server of the v0.1 protocol", host, self._token)
        self._app = self._setup_routes()
        self._launcher: PythonServerLauncher | None = None
        self._stopped = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """Address of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def task_timeout_seconds(self) -> float:
        """After this time a claimed task goes back to the queue."""
        return self._task_timeout_seconds

    @property
    def store(self) -> LightningStore:
        """Where tasks, results and resources are kept."""
        return self._data_store.store

    @property
    def _store(self) -> ServerDataStore | None:
        """What the routes use; None while the server is not running."""
        return self._app.data_store

    @property
    def _uvicorn_server(self) -> "uvicorn.Server | None":
        return None if self._launcher is None else self._launcher.server

    @property
    def _uvicorn_config(self) -> "uvicorn.Config | None":
        return None if self._uvicorn_server is None else self._uvicorn_server.config

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Serve in the background of the running loop; returns when requests are answered."""
        if self._launcher is not None:
            raise RuntimeError(f"The server on {self.endpoint} is running already; stop it before starting it again.")
        arguments = PythonServerLauncherArgs(host=self.host, port=self.port)
        self._launcher = launcher = PythonServerLauncher(self._app, arguments, self._lifespan())
        self._stopped = asyncio.Event()
        try:
            await launcher.start()
        except BaseException:
            self._launcher = None
            raise
        self.port = launcher.port  # of this one: it may have been stopped meanwhile
        self.startup_event.set()
        logger.info("Serving tasks on %s", self.endpoint)

    async def stop(self) -> None:
        """Finish requests in flight and stop; does nothing if the server is not running."""
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.stop()
        self._stopped.set()

    async def run_forever(self) -> None:
        """Serve until `stop` is called or the caller is cancelled."""
        if self._launcher is None:
            await self.start()
        try:
            await self._stopped.wait()
        finally:
            await self.stop()

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        """While it lasts, the routes have their state."""
        self._app.data_store = self._data_store
        self.loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self.startup_event.clear()
            self.loop = self._app.data_store = None

    def _setup_routes(self) -> LegacyApp:
        return LegacyApp(token=self._token)

    # ------------------------------------------------------------------ the algorithm's operations

    async def queue_task(
        self,
        sample: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: JsonObject | None = None,
    ) -> str:
        """Queue a task; the id of its rollout. InvalidValue if JSON cannot hold it."""
        return await self._running().add_task(sample, mode, resources_id, metadata)

    async def update_resources(self, resources: NamedResources) -> str:
        """Publish resources under a new id, which is returned; they become the latest."""
        return (await self._running().publish_resources(resources)).resources_id

    async def get_completed_rollout(self, rollout_id: str) -> RolloutLegacy | None:
        """Take the result of a rollout; None if it is not there, or was taken before."""
        return await self._running().retrieve_rollout(rollout_id)

    async def poll_completed_rollout(self, rollout_id: str, timeout: float | None = None) -> RolloutLegacy | None:
        """Wait for a result and take it; None if it does not come within `timeout` seconds, or was taken before.

        None waits for ever, 0 only looks.
        """
        data_store = self._running()
        found = await data_store.retrieve_rollout(rollout_id)
        may_wait = timeout is None or timeout > 0.0
        if found is None and may_wait and await data_store.wait_until_finished(rollout_id, timeout):
            found = await data_store.retrieve_rollout(rollout_id)
        return found

    async def retrieve_completed_rollouts(self) -> list[RolloutLegacy]:
        """Take all results that are there, the first one finished first."""
        return await self._running().retrieve_completed_rollouts()

    async def _check_and_requeue_stale_tasks(self) -> None:
        """Let go of tasks that the store has put back into its queue because their time has run out."""
        await self._running().forget_stale_tasks()

    def _running(self) -> ServerDataStore:
        if self._store is None:
            raise RuntimeError(f"The server on {self.endpoint} is not running; start it with `await server.start()`.")
        return self._store
