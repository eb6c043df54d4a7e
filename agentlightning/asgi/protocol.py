"""uvicorn's HTTP protocol with a limit on how long a connection may take to say what it wants.

uvicorn limits connections that are idle after an answer, but not those that begin a request and never finish its head;
a client that sends half a header would hold its connection for ever, and one that sends headers without end would fill
the memory.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 30.0
MOST_HEAD_BYTES = 64 * 1024
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class TimedProtocol(HttpToolsProtocol):
    """Closes connections whose request does not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0
    """What has arrived of a request whose head is not complete."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._stop_clock()
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._start_clock()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def _start_clock(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
