"""A backend written on bare sockets, which can do what no HTTP library would: break, lie, drip and hang."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from agentlightning.utils.loop_thread import LoopThread

PATIENCE_SECONDS = 30.0
EVENT_STREAM = "text/event-stream"


def until(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that is about to happen in another thread."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.005)


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection of the proxy to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self.is_ended = False

    async def send(self, *parts: bytes) -> None:
        """Send each part by itself."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def hang(self) -> None:
        """Do nothing until the other side leaves."""
        await self.reader.read()
        self.end()

    def end(self) -> None:
        self.is_ended = True
        self._writer.close()

    def reset(self) -> None:
        """End without a word, as a process that is killed does."""
        self.is_ended = True
        self._writer.transport.abort()


Act = Callable[[Asked, Connection], Awaitable[None]]


class RoughServer:
    """Answers each request with the next act; the last one is used for all that follow."""

    def __init__(self, acts: Sequence[Act]) -> None:
        self.acts = list(acts)
        self.asked: list[Asked] = []
        self.connections = 0
        """How many there were."""
        self.open_connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self.connections += 1
        self.open_connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while not connection.is_ended:
                    asked = await _read(reader)
                    await self._act_for(asked)(asked, connection)
        finally:
            self.open_connections -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _act_for(self, asked: Asked) -> Act:
        if asked.path.endswith("/models"):
            return whole(b"{}")
        self.asked.append(asked)
        return self.acts[min(len(self.asked), len(self.acts)) - 1]


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(head[0].split(" ")[1], headers, body)


@contextmanager
def rough(*acts: Act) -> Iterator[RoughServer]:
    """A rough server that runs for the length of the block."""
    server = RoughServer(acts)
    thread = LoopThread("rough-server")
    thread.run(server.start())
    try:
        yield server
    finally:
        thread.run(server.stop())
        thread.stop()


# ---------------------------------------------------------------------- acts


def head(status: int = 200, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Word", *headers, "", ""]).encode("latin-1")


def whole(body: bytes, status: int = 200, *headers: str, kind: str = "application/json") -> Act:
    """A proper answer."""
    sent = head(status, f"content-type: {kind}", f"content-length: {len(body)}", *headers) + body

    async def act(asked: Asked, connection: Connection) -> None:
        await connection.send(sent)

    return act


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = head(200, f"content-type: {EVENT_STREAM}", "transfer-encoding: chunked")
LAST_CHUNK = b"0\r\n\r\n"


def streamed(*parts: bytes, is_ended: bool = True) -> Act:
    """A stream of these parts, each in a chunk of its own."""

    async def act(asked: Asked, connection: Connection) -> None:
        await connection.send(STREAM_HEAD, *map(chunk, parts))
        if is_ended:
            await connection.send(LAST_CHUNK)

    return act


def sent(*parts: bytes) -> Act:
    """These bytes, and the end of the connection."""

    async def act(asked: Asked, connection: Connection) -> None:
        await connection.send(*parts)
        connection.end()

    return act


def then_hang(*parts: bytes) -> Act:
    """These bytes, and silence."""

    async def act(asked: Asked, connection: Connection) -> None:
        await connection.send(*parts)
        await connection.hang()

    return act


async def drop(asked: Asked, connection: Connection) -> None:
    connection.end()


async def reset(asked: Asked, connection: Connection) -> None:
    connection.reset()


# ---------------------------------------------------------------------- what a chat backend says


def completion(text: str = "fine", **more: Any) -> bytes:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps({**told, "usage": usage, **more}).encode()


def event(text: str | None = None, finish_reason: str | None = None, **more: Any) -> bytes:
    """One event of a chat's stream."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(told, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
FINE = streamed(event("fi"), event("ne"), event(None, "stop"), DONE)
"""A proper stream."""
