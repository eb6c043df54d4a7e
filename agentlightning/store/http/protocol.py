"""uvicorn's HTTP protocol with a limit on how long a connection may take to say what it wants.

uvicorn limits connections that are idle after an answer, but not those that begin a request and never finish its head;
a client that sends half a header would hold its connection for ever.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["TimedProtocol"]

HEADER_SECONDS = 30.0


class TimedProtocol(HttpToolsProtocol):
    """Closes connections whose request does not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        if self._deadline is None and (cycle is None or cycle.response_complete):
            self._start_clock()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_clock()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
