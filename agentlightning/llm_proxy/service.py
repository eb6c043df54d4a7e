"""The running proxy: its parts, in the loop of its own thread."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from agentlightning.llm_proxy.attribution import Authenticator
from agentlightning.llm_proxy.backends import BackendPool
from agentlightning.llm_proxy.budgets import Budgets
from agentlightning.llm_proxy.forking import inheritance
from agentlightning.llm_proxy.gateway import Gateway, GatewaySettings
from agentlightning.llm_proxy.journal import Journal
from agentlightning.llm_proxy.recorder import Recorder
from agentlightning.llm_proxy.replay import Replays
from agentlightning.store.base import LightningStore
from agentlightning.store.foreign import adapted
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

__all__ = ["Service"]

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS: Final = 75
"""Longer than pooled clients keep a connection, so that they close it first and never write into a closed one."""
STOP_SECONDS: Final = 10.0
"""Within which it must have stopped to serve; calls in flight get half of it to finish."""


class Service:
    """One running proxy. Made, started and stopped in the loop that serves."""

    def __init__(
        self,
        *,
        store: LightningStore,
        model_list: Sequence[Any],
        host: str,
        port: int,
        authenticator: Authenticator,
        num_retries: int = 0,
        deadline_seconds: float,
        journal: Path | None = None,
        budgets: Budgets | None = None,
        settings: GatewaySettings | None = None,
        replays: bool = False,
        raw_spans: bool = False,
        middlewares: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self.backends = BackendPool(model_list, num_retries=num_retries, deadline_seconds=deadline_seconds)
        store = adapted(store)
        self.recorder = Recorder(store, None if journal is None else Journal(journal), raw_spans=raw_spans)
        self.gateway = Gateway(
            self.backends,
            self.recorder,
            authenticator,
            settings=settings,
            budgets=budgets,
            replays=Replays(store) if replays else None,
        )
        app: Any = self.gateway
        for middleware in middlewares:
            app = middleware(app)
        arguments = PythonServerLauncherArgs(
            host=host, port=port, timeout_keep_alive=KEEP_ALIVE_SECONDS, thread_join_timeout=STOP_SECONDS
        )
        self._launcher = PythonServerLauncher(app, arguments)
        self._life = contextlib.AsyncExitStack()
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
            await self._life.enter_async_context(self.recorder.running())
            self._life.push_async_callback(self.backends.close)
            await self._launcher.start()
        except BaseException:
            await self._life.aclose()
            raise
        self._listening = _listening_files(self._launcher)
        for file in self._listening:
            inheritance().keep_file(file)
        self.recorder.recover()

    async def stop_serving(self) -> None:
        """Finish the calls in flight and free the port. Those that take longer than a few seconds are cut."""
        for file in self._listening:
            inheritance().release_file(file)
        await self._launcher.stop()

    async def close(self) -> None:
        """Store what the calls have left, and leave."""
        await asyncio.shield(self._life.aclose())

    async def status(self) -> dict[str, Any]:
        """How it is; asked in the loop, where the counts do not change meanwhile."""
        return self.gateway.status()

    async def replace_models(self, model_list: Sequence[Any]) -> None:
        """Swap the backends; calls in flight finish on the old ones."""
        self.gateway.plain_backends &= self.backends.replace(model_list)

    async def flush(self, timeout: float) -> bool:
        return await self.recorder.flush(timeout=timeout)


def _listening_files(launcher: PythonServerLauncher) -> list[int]:
    """Descriptors of the sockets on which connections arrive."""
    servers = [] if launcher.server is None else launcher.server.servers
    return [listening.fileno() for server in servers for listening in server.sockets]
