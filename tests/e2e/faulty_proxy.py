"""A bad network on loopback: a proxy between clients and a store server that loses, delays, cuts and doubles.

It reads HTTP requests and replies, and after an upgrade WebSocket frames, so that every fault hits one whole message.
Chance is seeded; what is hit still depends on the order in which messages come.
"""

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from typing_extensions import Self

__all__ = ["FAULTS", "FaultyProxy"]

FAULTS = ("drop request", "drop reply", "delay", "truncate", "duplicate")
_ON_REQUEST = ("drop request", "delay", "duplicate")
_ON_REPLY = ("drop reply", "delay", "truncate")
_DATA_OPCODES = (0, 1, 2)


class _Cut(Exception):
    """The connection is to be reset."""


class FaultyProxy:
    """Each fault has the same probability for each message it can hit."""

    def __init__(self, port: int, *, probability: float = 0.0, seed: int = 1) -> None:
        self.happened: Counter[str] = Counter()
        self._upstream_port = port
        self._probability = probability
        self._chance = random.Random(seed)
        self._server: asyncio.Server | None = None
        # Holds the port while nobody listens, for another program would take it; both sockets may be bound at once.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port: int = self._reserved.getsockname()[1]
        self._connections: set[_Connection] = set()
        self.last_sent: tuple[_Connection, bytes] | None = None
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        self.holds_reply = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.refuse()
        self._reserved.close()

    async def send_again(self) -> None:
        """Let the server have the last request once more, as if a copy had been long on its way; drop its answer."""
        assert self.last_sent is not None
        connection, request = self.last_sent
        await connection.send_again(request)

    async def listen(self) -> None:
        """Take connections, on the same port each time."""
        self.may_reply.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=1024)

    async def refuse(self) -> None:
        """Reset all connections and take no more, as if the server's machine were gone."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [connection.task for connection in self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def freeze(self) -> int:
        """Forward nothing more on the present connections, and leave them open; returns how many they are."""
        for connection in self._connections:
            connection.is_frozen = True
        return len(self._connections)

    def hold_replies(self) -> None:
        """Let requests through and keep the replies."""
        self.may_reply.clear()
        self.holds_reply.clear()

    def release_replies(self) -> None:
        self.may_reply.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, reader, writer)
        self._connections.add(connection)
        try:
            await connection.serve()
        except (_Cut, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # either side went away, or was made to
        finally:
            connection.reset()
            self._connections.discard(connection)

    def draw(self, possible: tuple[str, ...]) -> str | None:
        """A fault, or more often none."""
        number = self._chance.random()
        for fault in possible:
            if number < self._probability:
                self.happened[fault] += 1
                return fault
            number -= self._probability
        return None

    async def linger(self) -> None:
        await asyncio.sleep(self._chance.uniform(0.05, 0.3))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._upstream_port)


class _Connection:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: FaultyProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.is_frozen = False
        self._is_cut_short = False
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._server_reader: asyncio.StreamReader = None  # type: ignore[assignment] # set by `serve`
        self._server_writer: asyncio.StreamWriter | None = None
        self._copies: set[asyncio.Future[None]] = set()
        self._is_upgraded = False

    def reset(self) -> None:
        for copy in self._copies:
            copy.cancel()
        if self._is_cut_short:
            self._writer.close()  # so that what was sent arrives
        else:
            _reset(self._writer)
        if self._server_writer is not None:
            _reset(self._server_writer)

    async def send_again(self, request: bytes) -> None:
        if self._is_upgraded:
            await self._forward(self._server_writer, request)
        else:
            await self._send_copy(request)

    async def serve(self) -> None:
        self._server_reader, self._server_writer = await self._proxy.connect()
        first = await self._reader.readexactly(1)
        while True:
            request = first + await _read_message(self._reader)
            if b"upgrade: websocket" in request.lower():
                await self._serve_frames(request)
                return
            leaving = asyncio.ensure_future(self._reader.readexactly(1))
            try:
                await self._exchange(request, leaving)
                first = await leaving
            finally:
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)

    # ------------------------------------------------------------------ HTTP

    async def _exchange(self, request: bytes, leaving: "asyncio.Future[bytes]") -> None:
        fault = self._proxy.draw(FAULTS)
        if fault == "drop request":
            raise _Cut
        if fault == "delay":
            await self._proxy.linger()
        if fault == "duplicate":
            self._copies.add(asyncio.ensure_future(self._send_copy(request)))
        await self._forward(self._server_writer, request)
        replying = asyncio.ensure_future(_read_message(self._server_reader))
        try:
            await asyncio.wait([replying, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not replying.done():
                raise _Cut
            reply = replying.result()
        finally:
            replying.cancel()
            await asyncio.gather(replying, return_exceptions=True)
        if fault == "drop reply":
            raise _Cut
        if fault == "truncate":
            await self._send_half(reply)
        await self._forward(self._writer, reply)

    async def _send_copy(self, request: bytes) -> None:
        """The same request on another connection; its answer is nobody's."""
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await self._proxy.connect()
            try:
                writer.write(request)
                await _read_message(reader)
            finally:
                writer.close()

    # ------------------------------------------------------------------ WebSocket

    async def _serve_frames(self, handshake: bytes) -> None:
        self._is_upgraded = True
        await self._forward(self._server_writer, handshake)
        await self._forward(self._writer, await _read_message(self._server_reader))
        pumps = [
            asyncio.ensure_future(self._pump(self._reader, self._send_request)),
            asyncio.ensure_future(self._pump(self._server_reader, self._send_reply)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, send: Callable[[bytes, str | None], Awaitable[None]]) -> None:
        possible = _ON_REQUEST if reader is self._reader else _ON_REPLY
        while True:
            opcode, frame = await _read_frame(reader)
            fault = self._proxy.draw(possible) if opcode in _DATA_OPCODES else None
            if fault in ("drop request", "drop reply"):
                raise _Cut
            if fault == "delay":
                await self._proxy.linger()
            await send(frame, fault)

    async def _send_request(self, frame: bytes, fault: str | None) -> None:
        await self._forward(self._server_writer, frame * 2 if fault == "duplicate" else frame)

    async def _send_reply(self, frame: bytes, fault: str | None) -> None:
        if fault == "truncate":
            await self._send_half(frame)
        await self._forward(self._writer, frame)

    async def _send_half(self, message: bytes) -> None:
        await self._forward(self._writer, message[: len(message) // 2])
        self._is_cut_short = True
        raise _Cut

    async def _forward(self, writer: asyncio.StreamWriter | None, message: bytes) -> None:
        assert writer is not None
        if self.is_frozen:
            await asyncio.Event().wait()
        if writer is self._writer:
            self._proxy.holds_reply.set()
            await self._proxy.may_reply.wait()
        else:
            self._proxy.last_sent = (self, message)
        writer.write(message)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of a goodbye, after what was written has been handed to the system."""
    tcp: Any = writer.get_extra_info("socket")
    with suppress(OSError):
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """An HTTP request or reply with its body, whose length stands in the header."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return head + await reader.readexactly(int(value))
    assert b"transfer-encoding" not in head.lower()
    return head


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """A WebSocket frame: its opcode and all its bytes."""
    frame = await reader.readexactly(2)
    opcode, is_masked, length = frame[0] & 0x0F, bool(frame[1] & 0x80), frame[1] & 0x7F
    if length >= 126:
        extended = await reader.readexactly(2 if length == 126 else 8)
        frame += extended
        length = int.from_bytes(extended, "big")
    return opcode, frame + await reader.readexactly(length + (4 if is_masked else 0))
