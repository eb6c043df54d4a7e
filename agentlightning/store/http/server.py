"""LightningStoreServer: a store that others can reach.

In the process that made it, it is the store itself with a server beside it. In any other process (a forked child, or
wherever it was unpickled) it is a client of that server. So one object can be handed to an algorithm and to its
runners.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentlightning.asgi.bodies import LARGE_BYTES
from agentlightning.env_var import LightningEnvVar, resolve_int_env_var, resolve_str_env_var
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.forwarding import LightningStoreThreaded, StoreWrapper
from agentlightning.store.http.app import build_app
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.codec import MOST_FRAME_BYTES
from agentlightning.store.http.service import DEFAULT_MAX_REQUEST_BYTES
from agentlightning.store.http.tokens import check_secret
from agentlightning.utils.metrics import MetricsBackend
from agentlightning.utils.once import fork_handlers
from agentlightning.utils.server_launcher import (
    LaunchMode,
    PythonServerLauncher,
    PythonServerLauncherArgs,
    is_loopback,
)

__all__ = ["LightningStoreServer", "checked_token", "warn_if_open"]

logger = logging.getLogger(__name__)

PING_SECONDS = 20.0
STARTUP_SECONDS = 60.0


class LightningStoreServer(StoreWrapper):
    """A store with an HTTP and WebSocket server."""

    def __init__(
        self,
        store: LightningStore,
        host: str | None = None,
        port: int | None = None,
        cors_allow_origins: Sequence[str] | str | None = None,
        launch_mode: LaunchMode = "thread",
        launcher_args: PythonServerLauncherArgs | None = None,
        n_workers: int = 1,
        tracker: MetricsBackend | None = None,
        *,
        token: str | None = None,
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
    ) -> None:
        """Prepare to serve a store; `start` does.

        Args:
            store: What is served; it stays the caller's to close.
            host: Address to bind, this machine only by default.
            port: 0 takes a free one; by default the environment's `AGL_SERVER_PORT`, or 4747.
            cors_allow_origins: Web pages of these origins may call; "*" for all.
            launch_mode: "thread" serves beside the caller's loop, "asyncio" in it.
            launcher_args: Everything about launching, in the place of host, port, launch_mode and n_workers.
            n_workers: Must be 1; more servers of one database are started by themselves.
            tracker: Measures every operation, besides the figures at /metrics.
            token: What callers must show; by default the environment's `AGL_STORE_TOKEN`, without which all may call.
            max_request_bytes: Larger requests are refused.
        """
        self.store = store
        self.launcher_args = launcher_args or PythonServerLauncherArgs(
            host=host or "127.0.0.1",
            port=resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, port, fallback=4747),
            launch_mode=launch_mode,
            n_workers=n_workers,
            startup_timeout=STARTUP_SECONDS,
        )
        self._token = checked_token(resolve_str_env_var(LightningEnvVar.AGL_STORE_TOKEN, token))
        warn_if_open("store server", self.launcher_args.host or "127.0.0.1", self._token)
        served = store if store.capabilities.get("thread_safe") else LightningStoreThreaded(store)
        self.app = build_app(
            served,
            token=self._token,
            cors_allow_origins=[cors_allow_origins] if isinstance(cors_allow_origins, str) else cors_allow_origins,
            tracker=tracker,
            max_request_bytes=max_request_bytes,
        )
        self.launcher_args.uvicorn_options = (
            _UVICORN
            | {"ws_max_size": min(max_request_bytes, LARGE_BYTES) + 2 * MOST_FRAME_BYTES}
            | dict(self.launcher_args.uvicorn_options)
        )
        self._launcher: PythonServerLauncher | None = PythonServerLauncher(self.app, self.launcher_args)
        self._target: LightningStore = served
        self._address = ""
        fork_handlers().add(self, _become_client)

    # ------------------------------------------------------------------ addresses

    @property
    def host(self) -> str:
        return self.launcher_args.host or "127.0.0.1"

    @property
    def port(self) -> int:
        return self._launcher.port if self._launcher is not None else self.launcher_args.port or 0

    @property
    def endpoint(self) -> str:
        """Where clients find it."""
        return self._launcher.access_endpoint if self._launcher is not None else self._address

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Serve in the background; raises RuntimeError if the port is taken or the server does not come up."""
        launcher = self._own_launcher()
        self.app.service.is_closing = False
        await launcher.start()
        logger.info("The store is served at %s", self.endpoint)

    async def stop(self) -> None:
        """Finish what is being done and stop serving; the store stays open."""
        await self._own_launcher().stop()

    async def run_forever(self) -> None:
        """Serve in the current loop until `stop` is called or the caller is cancelled."""
        launcher = self._own_launcher()
        self.app.service.is_closing = False
        await launcher.run_forever()

    def _own_launcher(self) -> PythonServerLauncher:
        if self._launcher is None:
            raise RuntimeError("Only the process that made a store server can start or stop it.")
        return self._launcher

    def __getstate__(self) -> dict[str, object]:
        args = replace(self.launcher_args, port=self.port, reserved=None)
        return {"address": self.endpoint, "token": self._token, "args": args}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.launcher_args = state["args"]
        self._token = state["token"]
        self._launcher = None
        self._address = state["address"]
        self._target = LightningStoreClient(self._address, token=self._token)

    # ------------------------------------------------------------------ the store it is

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {**super().capabilities, "zero_copy": True, "otlp_traces": True}

    def otlp_traces_endpoint(self) -> str:
        return f"{self.endpoint}/v1/traces"

    async def close(self) -> None:
        """Stop serving if it serves, and close the store, or in another process the connections to it."""
        if self._launcher is not None:
            await self.stop()
        await super().close()


_UVICORN: dict[str, Any] = {
    "ws_ping_interval": PING_SECONDS,
    "ws_ping_timeout": PING_SECONDS,
    "ws_per_message_deflate": False,
    "lifespan": "off",
}


def checked_token(token: str | None) -> str | None:
    """A master token that can serve as one; None stands for none, and so does an empty one."""
    if not token:
        return None
    check_secret(token)
    return token


def warn_if_open(server: str, host: str, token: str | None) -> None:
    """Warn of a server that other machines reach and that asks for no token."""
    if token is None and not is_loopback(host):
        logger.warning(
            "The %s on %s asks for no token, so everybody who reaches it can read and change the store; "
            "give a token, or set %s.",
            server,
            host,
            LightningEnvVar.AGL_STORE_TOKEN.value,
        )


def _become_client(server: LightningStoreServer) -> None:
    """In a forked child: the server is the parent's, and is spoken to like any other."""
    if server._launcher is not None:
        server._address = server.endpoint
        server._launcher = None
        server.store = server._target = LightningStoreClient(server._address, token=server._token)
