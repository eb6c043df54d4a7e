"""The running proxy: its parts, in the loop of its own thread."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

from agentlightning.llm_proxy.backends import BackendPool
from agentlightning.llm_proxy.gateway import Gateway, GatewaySettings
from agentlightning.llm_proxy.recorder import Recorder
from agentlightning.store.base import LightningStore
from agentlightning.utils.once import fork_handlers
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

KEEP_ALIVE_SECONDS: Final = 75
"""Longer than pooled clients keep a connection, so that they close it first and never write into a closed one."""
STOP_SECONDS: Final = 10.0
"""Within which it must have stopped to serve; calls in flight get half of it to finish."""


class Service:
    """One running proxy. Made, started and stopped in the loop that serves."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        store: LightningStore,
        model_list: Sequence[Any],
        host: str,
        port: int,
    ) -> None:
        self._backends = BackendPool(
            model_list, num_retries=settings.num_retries, deadline_seconds=settings.deadline_seconds
        )
        self.recorder = Recorder(store, raw_spans=settings.raw_spans)
        self.gateway = Gateway(self._backends, self.recorder, settings=settings)
        app: Any = self.gateway
        for middleware in settings.middlewares:
            app = middleware(app)
        arguments = PythonServerLauncherArgs(
            host=host, port=port, timeout_keep_alive=KEEP_ALIVE_SECONDS, thread_join_timeout=STOP_SECONDS
        )
        self._launcher = PythonServerLauncher(app, arguments)
        self._cleanup = contextlib.AsyncExitStack()
        self._listening: list[int] = []

    @property
    def port(self) -> int:
        return self._launcher.port

    @property
    def is_serving(self) -> bool:
        return self._launcher.is_running()

    async def start(self) -> None:
        """Serve; RuntimeError if the port is taken."""
        try:
            await self._cleanup.enter_async_context(self.recorder.running())
            self._cleanup.push_async_callback(self._backends.close)
            await self._launcher.start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        self._cleanup.push_async_callback(self.stop_serving)
        servers = [] if self._launcher.server is None else self._launcher.server.servers
        self._listening = [listening.fileno() for server in servers for listening in server.sockets]
        fork_handlers().add(self, Service._close_in_child)

    def _close_in_child(self) -> None:
        """A forked child must not keep the port taken after its parent has stopped."""
        while self._listening:
            with contextlib.suppress(OSError):
                os.close(self._listening.pop())

    async def stop_serving(self) -> None:
        """Finish the calls in flight and free the port. Those that take longer than a few seconds are cut."""
        self._listening.clear()
        await self._launcher.stop()

    async def close(self) -> None:
        """Stop to serve, and store what the calls have left."""
        await asyncio.shield(self._cleanup.aclose())

    async def status(self) -> dict[str, Any]:
        """The state; read in the loop, where the counts do not change meanwhile."""
        return self.gateway.status()

    async def replace_models(self, model_list: Sequence[Any]) -> None:
        """Replace the backends; calls in flight finish on the old ones."""
        self.gateway.plain_backends &= self._backends.replace(model_list)
