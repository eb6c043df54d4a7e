"""uvicorn's server, which stops at once: its own looks every 100 ms whether it should, and again whether it has.

This is the only module that knows the insides of uvicorn.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

from agentlightning.utils.deadline import until, within

__all__ = ["StoppableServer"]

POLL_SECONDS: Final = 0.005
"""Between two looks at requests in flight when it stops."""


def _without_traceback(record: logging.LogRecord) -> bool:
    """Have a text that is not UTF-8, for which uvicorn closes a WebSocket, logged in one line: a client sent it."""
    if record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError):
        record.exc_info = None
    return True


class StoppableServer(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    def __init__(self, config: uvicorn.Config, begin_shutdown: Callable[[], None] | None) -> None:
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_without_traceback)
        self._begin_shutdown = begin_shutdown
        self._leave = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Finish requests in flight and end; can be called from any thread."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._leave.set)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                # The date in the heads of responses is kept for a second.
                await within(1.0, self._leave.wait())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._begin_shutdown is not None:
            self._begin_shutdown()
        # A server that is closed between two steps of accepting a connection leaves that open: first accept no more.
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError):  # another kind of loop
            for listening in (each for server in self.servers for each in server.sockets):
                loop.remove_reader(listening)
        # After three rounds of the event loop a connection that was accepted last is known to the server.
        for _ in range(3):
            await asyncio.sleep(0)
        for closing in (*self.servers, *(sockets or ())):
            closing.close()
        state = self.server_state
        for connection in tuple(state.connections):
            connection.shutdown()
        await until(
            lambda: not state.connections and not state.tasks,
            timeout_seconds=self.config.timeout_graceful_shutdown,
            interval_seconds=POLL_SECONDS,
        )
        for task in tuple(state.tasks):
            task.cancel()
        # Those whose request outlasted the patience.
        for connection in tuple(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        await self.lifespan.shutdown()
