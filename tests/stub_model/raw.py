"""Answers of the stub model byte by byte, proper and broken: turns for a script that need no dialect."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from tests.stub_model.script import Handler, Request

PATIENCE_SECONDS = 30.0
EVENT_STREAM = "text/event-stream"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def until(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that is about to happen in another thread."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.005)


class Connection:
    """One connection of a client to the server."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
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
        await asyncio.Event().wait()

    def end(self) -> None:
        self.is_ended = True
        self._writer.close()

    def reset(self) -> None:
        """End without a word, as a process that is killed does."""
        self.is_ended = True
        self._writer.transport.abort()


def head(status: int = 200, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Word", *headers, "", ""]).encode("latin-1")


STREAM_HEAD = head(200, f"content-type: {EVENT_STREAM}", "transfer-encoding: chunked")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def response(body: bytes, status: int = 200, *headers: str, kind: str = "application/json") -> bytes:
    """A proper response."""
    return head(status, f"content-type: {kind}", f"content-length: {len(body)}", *headers) + body


def sent(*parts: bytes, is_ended: bool = True, hangs: bool = False) -> Handler:
    """These bytes, and then the end of the connection, silence, or the next request."""

    async def handle(request: Request, connection: Connection) -> None:
        await connection.send(*parts)
        if hangs:
            await connection.hang()
        if is_ended:
            connection.end()

    return handle


def whole(body: bytes = b'{"ok": true}', status: int = 200, *headers: str, kind: str = "application/json") -> Handler:
    """A proper answer."""
    return sent(response(body, status, *headers, kind=kind), is_ended=False)


def streamed(*parts: bytes, is_ended: bool = True) -> Handler:
    """A stream of these parts, each in a chunk of its own."""
    return sent(STREAM_HEAD, *map(chunk, parts), *([LAST_CHUNK] if is_ended else []), is_ended=False)


def then_hang(*parts: bytes) -> Handler:
    """These bytes, and silence."""
    return sent(*parts, hangs=True)


drop = sent()
hang = then_hang()
halve = sent(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
garble = sent(b"\x00\x01 what is this\r\n\r\n")
trickle = then_hang(STREAM_HEAD, chunk(b"first"))


async def reset(request: Request, connection: Connection) -> None:
    connection.reset()


def after(event: asyncio.Event, handler: Handler) -> Handler:
    """What the handler answers, once the event has been set."""

    async def later(request: Request, connection: Connection) -> None:
        await event.wait()
        await handler(request, connection)

    return later


# ---------------------------------------------------------------------- what a chat backend answers


def completion(text: str = "fine", **more: Any) -> bytes:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps({**body, "usage": usage, **more}).encode()


def event(text: str | None = None, finish_reason: str | None = None, **more: Any) -> bytes:
    """One event of a chat's stream."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


FINE = streamed(event("fi"), event("ne"), event(None, "stop"), DONE)
"""A proper stream."""


FIRST_EVENTS = {
    "completions": b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "One"}}]}\n\n',
    "responses": b'event: e\ndata: {"type": "response.output_text.delta", "delta": "One", "sequence_number": 1}\n\n',
    "messages": b'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0, "delta": {}}\n\n',
}


def held_until_read() -> Handler:
    """Streams of one event that end when their reader sends another request: who reads late waits for ever."""
    has_read = asyncio.Event()

    async def answer(request: Request, connection: Connection) -> None:
        if not request.is_streaming:
            has_read.set()
            await connection.send(response(b'{"id": "c", "choices": []}'))
            return
        kind = request.path.rpartition("/")[2]
        await connection.send(STREAM_HEAD, chunk(FIRST_EVENTS[kind]))
        await has_read.wait()
        has_read.clear()
        await connection.send(*([] if kind == "messages" else [chunk(DONE)]), LAST_CHUNK)

    return answer
