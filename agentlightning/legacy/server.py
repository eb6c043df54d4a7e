"""AgentLightningServer: the algorithm's side of the v0.1 protocol, over a `LightningStore`.

Tasks queued here can be run by old clients over HTTP or by new runners over the store, and whoever ran them, their
results come back here. Serving is left to the server launcher, everything that is remembered to the store.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.legacy.data_store import ServerDataStore
from agentlightning.legacy.routes import LegacyApp
from agentlightning.store.base import LightningStore
from agentlightning.store.http.server import checked_token, warn_if_open
from agentlightning.types import NamedResources, RolloutLegacy, RolloutMode, TaskInput
from agentlightning.utils.deprecation import deprecated
from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)


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
        self._serving = ExitStack()
        """Ends `_lifespan`."""
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
        arguments = PythonServerLauncherArgs(host=self.host, port=self.port, launch_mode="asyncio")
        self._launcher = launcher = PythonServerLauncher(self._app, arguments)
        self._stopped = asyncio.Event()
        self._serving.enter_context(self._lifespan())
        try:
            await launcher.start()
        except BaseException:
            self._launcher = None
            self._serving.close()
            raise
        self.port = launcher.port  # of this one: it may have been stopped meanwhile
        self.startup_event.set()
        logger.info("Serving tasks on %s", self.endpoint)

    async def stop(self) -> None:
        """Finish requests in flight and stop; does nothing if the server is not running."""
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.stop()
        self._serving.close()
        self._stopped.set()

    async def run_forever(self) -> None:
        """Serve until `stop` is called or the caller is cancelled."""
        if self._launcher is None:
            await self.start()
        try:
            await self._stopped.wait()
        finally:
            await self.stop()

    @contextmanager
    def _lifespan(self) -> Iterator[None]:
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
