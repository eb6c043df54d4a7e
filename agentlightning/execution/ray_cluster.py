"""RayExecutionStrategy: runners as actors on the nodes of a Ray cluster, around a store server beside the algorithm.

Ray places the runners, starts them again, and brings the program's code to its nodes. Work, spans and rewards do not
pass through Ray: every runner is a client of the store.
"""

import asyncio
import copy
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from agentlightning.env_var import LightningEnvVar, resolve_int_env_var, resolve_str_env_var
from agentlightning.errors import ConfigurationError, TrainingError
from agentlightning.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from agentlightning.execution.events import ThreadingEvent
from agentlightning.execution.ray_runners import RayRunners, RunnerActor, pickled_runner
from agentlightning.execution.watch import Watch
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.forwarding import innermost
from agentlightning.store.http.reader_file import reader_token_file
from agentlightning.store.http.tokens import Scope, sign_token
from agentlightning.utils.installation import install_command
from agentlightning.utils.server_launcher import is_loopback

logger = logging.getLogger(__name__)

THIS_MACHINE: Final = "127.0.0.1"
EVERYWHERE: Final = ("0.0.0.0", "::")
JOB_VARIABLE: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in a program that `ray job submit` started."""
RAY_OPTIONS: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""What Ray calls those of its resources that have a name of their own."""
NO_CPU: Final = 0.01
"""What a runner reserves that is to reserve nothing: an actor without any resource is placed at random, not spread."""
NOT_SENT: Final = (".git", ".venv*", ".env", "*.db", "*.db-wal", "*.db-shm")
"""What is left out of the program's folder, besides what its .gitignore names."""


class RayExecutionStrategy(ExecutionStrategy):
    """The algorithm runs here and serves the store; runners are actors wherever Ray places them."""

    alias = "ray"

    def __init__(
        self,
        address: str | None = None,
        n_runners: int = 1,
        *,
        resources: Mapping[str, float] | None = None,
        placement: Any = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        graceful_timeout: float = 5.0,
    ) -> None:
        """Nothing runs yet.

        Args:
            address: Of the cluster to join, `auto` for the one that runs on this machine; RAY_ADDRESS if left out,
                else Ray is started on this machine for the length of the training. Where the program has called
                `ray.init` itself, that cluster is used.
            n_runners: How many runners; `scale` changes it.
            resources: What each reserves, such as `{"CPU": 1, "GPU": 0.5}`; nothing if left out.
            placement: Ray's scheduling strategy: `SPREAD` over the nodes, `DEFAULT` to fill one after the other, or an
                object such as a `PlacementGroupSchedulingStrategy`.
            runtime_env: What the nodes need, as Ray takes it. On a cluster `working_dir` is the folder of the program
                unless it is given; None there sends nothing.
            server_host: Where the store is served; AGL_SERVER_HOST if left out, else this machine's address in the
                cluster.
            server_port: Its port; AGL_SERVER_PORT if left out, else one that is free.
            graceful_timeout: Seconds that rollouts which still run at the end have to finish.
        """
        try:
            import ray  # noqa: F401 # it is loaded here to say at once that it is missing
        except ModuleNotFoundError as error:
            raise ImportError(f"strategy='ray' needs the package ray: run `{install_command('ray')}`.") from error
        self.address = address or os.environ.get("RAY_ADDRESS") or None
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigurationError(
                f"address is {self.address!r}, and runners could not reach a store outside of their cluster; start the "
                "program on a node of the cluster, with address='auto' or by `ray job submit`."
            )
        self.n_runners = _checked_count(n_runners)
        self.resources = dict(resources or {})
        for name in self.resources:
            if name not in RAY_OPTIONS and name.upper().removeprefix("NUM_").rstrip("S") in RAY_OPTIONS:
                raise ConfigurationError(f"resources has {name!r}, which no node offers; Ray calls it 'CPU' or 'GPU'.")
        self.placement = placement
        self.runtime_env = None if runtime_env is None else dict(runtime_env)
        self.server_host = resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, server_host)
        self.server_port = resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, server_port, fallback=0)
        self.graceful_timeout = graceful_timeout
        self._scaling = threading.Lock()  # protects the pair below, which `scale` reads in any thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runners: RayRunners | None = None
        self._is_own_connection = False
        """Whether it was this strategy that connected to Ray, and that disconnects."""

    def scale(self, n_runners: int) -> None:
        """Have so many runners from now on, also while a training runs; may be called in any thread, and does not wait.

        New ones join when Ray has placed them. Those that leave finish what they run.
        """
        count = _checked_count(n_runners)
        with self._scaling:
            self.n_runners = count
            if self._loop is not None and self._runners is not None:
                self._loop.call_soon_threadsafe(self._runners.scale, count)

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Run until the algorithm is done; what it or a runner raises is raised here."""
        self.is_interrupted = False
        try:
            with self._connected():
                asyncio.run(self._execute(algorithm, runner, store))
        except KeyboardInterrupt:
            self.is_interrupted = True
            logger.warning("KeyboardInterrupt received; everything has been stopped.")

    async def _execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        pickled, stop = pickled_runner(runner), ThreadingEvent()
        async with self._served(store) as served:
            runners = RayRunners(self._actors(served.client), runner, pickled, served.store, stop)
            try:
                with self._scaling:
                    self._loop, self._runners = asyncio.get_running_loop(), runners
                    runners.scale(self.n_runners)
                async with Watch(algorithm, served.store, stop, runners, grace_seconds=self.graceful_timeout):
                    await algorithm(served.store, stop)
            except Exception as error:
                if runners.failure is not None:
                    raise runners.failure from error
                raise
            finally:
                with self._scaling:
                    self._loop = self._runners = None
                stop.set()
                await runners.stop(self.graceful_timeout)
        if runners.failure is not None:
            raise runners.failure

    def _actors(self, client: LightningStoreClient) -> Callable[[int], Any]:
        """What makes the actor of a number."""
        import ray

        named = {RAY_OPTIONS[name]: amount for name, amount in self.resources.items() if name in RAY_OPTIONS}
        others = {name: amount for name, amount in self.resources.items() if name not in RAY_OPTIONS}
        options = {"num_cpus": NO_CPU, **named, "resources": others, "scheduling_strategy": self.placement}
        if not self._is_own_connection:
            options["runtime_env"] = self._sent_environment()
        actor_class = ray.remote(RunnerActor).options(max_restarts=-1, max_task_retries=-1, **options)
        package = logging.getLogger("agentlightning")
        log_level = package.getEffectiveLevel() if package.handlers else None
        return lambda number: actor_class.remote(number, client, log_level)

    # ------------------------------------------------------------------ the cluster

    @contextmanager
    def _connected(self) -> Iterator[None]:
        import ray

        if ray.is_initialized():
            yield
            return
        on_sigterm = signal.getsignal(signal.SIGTERM)
        self._is_own_connection = True
        try:
            try:
                self._connect()
            finally:  # Ray sets a handler of its own, and the trainer has one
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, on_sigterm)
            yield
        finally:
            self._is_own_connection = False
            ray.shutdown()

    def _connect(self) -> None:
        import ray

        options: dict[str, Any] = {"runtime_env": self._sent_environment(), "logging_level": logging.WARNING}
        if self.address is None:
            options["include_dashboard"] = False
        try:
            ray.init(self.address or "local", **options)
        except ConnectionError as error:
            raise TrainingError(
                f"No Ray cluster can be reached at {self.address!r} ({error}); start one with `ray start --head`, or "
                "leave the address out to run Ray on this machine alone."
            ) from error

    def _sent_environment(self) -> dict[str, Any] | None:
        """The runtime environment, with the program's folder where nodes may need it that Ray has not sent yet."""
        environment = dict(self.runtime_env or {})
        is_new = self._is_own_connection and self.address is not None and JOB_VARIABLE not in os.environ
        if is_new and "working_dir" not in environment:
            environment["working_dir"] = _program_folder()
            environment["excludes"] = [*NOT_SENT, *environment.get("excludes", ())]
        if environment.get("working_dir", "") is None:
            del environment["working_dir"]
            environment.pop("excludes", None)
        return environment or None

    # ------------------------------------------------------------------ the store

    @asynccontextmanager
    async def _served(self, store: LightningStore) -> AsyncIterator["_Served"]:
        """The store, while runners can reach it; one that is on a server already is reached there."""
        inner = innermost(store)
        if isinstance(inner, LightningStoreClient):
            self._check_reachable(urlsplit(inner.server_address).hostname or "", f"store '{inner.server_address}'")
            yield _Served(store, copy.copy(inner))
            return
        host = self.server_host or self._own_address()
        self._check_reachable(host, f"server_host '{host}'")
        token = resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN) or secrets.token_urlsafe()
        server = self._server(store, host, token)
        await server.start()
        try:
            for_runners = sign_token(token, Scope("runner"), expires_at=None)
            with reader_token_file(host, server.port, token):
                yield _Served(server, LightningStoreClient(server.endpoint, token=for_runners))
        finally:
            await server.stop()

    def _server(self, store: LightningStore, host: str, token: str) -> LightningStoreServer:
        server = LightningStoreServer(store, host, self.server_port, token=token)
        if host in EVERYWHERE:
            server.launcher_args.access_host = self._own_address()
        return server

    def _own_address(self) -> str:
        """By which the nodes reach this machine."""
        import ray

        is_alone = self._is_own_connection and self.address is None
        return THIS_MACHINE if is_alone else str(ray.util.get_node_ip_address())

    def _check_reachable(self, host: str, written: str) -> None:
        """Refuse an address of this machine's own where Ray has nodes on others."""
        import ray

        own = ray.util.get_node_ip_address()
        others = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        if is_loopback(host) and (elsewhere := sorted({one for one in others if one != own})):
            raise ConfigurationError(
                f"{written} can be reached from this machine only, and Ray has nodes on {', '.join(elsewhere)}; "
                f"write this machine's address in the cluster, which is {own}."
            )


@dataclass(frozen=True)
class _Served:
    """A store that runners reach."""

    store: LightningStore
    """For the algorithm."""
    client: LightningStoreClient
    """For runners, who may do with it what runners do, and no more."""


def _checked_count(n_runners: int) -> int:
    if n_runners < 1:
        raise ConfigurationError(f"n_runners must be at least 1; it is {n_runners}.")
    return n_runners


def _program_folder() -> str | None:
    """The folder of the program, or the current one of `python -m` and notebooks; None where it holds more than that.

    A home folder holds a user's secrets, and an installation of Python is on the nodes already.
    """
    main = sys.modules["__main__"]
    is_program = getattr(main, "__spec__", None) is None and hasattr(main, "__file__")
    folder, home = Path(main.__file__ or "").parent if is_program else Path(), Path.home().resolve()
    folder = folder.resolve()
    is_installed = Path(sys.prefix).resolve() in (folder, *folder.parents)
    return None if is_installed or folder in (home, *home.parents) else str(folder)
