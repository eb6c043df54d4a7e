"""uvicorn's HTTP protocol with a limit on how long a connection may take to say what it wants.

uvicorn limits connections that are idle after an answer, but not those that begin a request and never finish its head;
a client that sends half a header would hold its connection for ever, and one that sends headers without end would fill
the memory.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 30.0
MOST_HEAD_BYTES = 64 * 1024
_TRANSPORT = "agentlightning.transport"
"""The key of a connection's transport in the `state` of its scopes."""
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Outbox:
    """What of a connection has been written and has not left this process."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self._transport: Any = scope.get("state", {}).get(_TRANSPORT)

    def unsent_bytes(self) -> int:
        size: int = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return size

    async def abort(self) -> None:
        """End the connection without sending the rest, for which closing it would wait."""
        if self._transport is not None:
            self._transport.abort()
            await asyncio.sleep(0)  # its protocol is told in the next round of the loop


class TimedProtocol(HttpToolsProtocol):
    """Closes connections whose request does not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0
    """What has arrived of a request whose head is not complete."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, _TRANSPORT: transport}
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
