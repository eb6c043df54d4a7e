"""A backend on loopback that does exactly what a test tells it, well-behaved or not, and a clock that a test turns."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentlightning.llm_proxy.backends import Ask, Backend, Clock, Outgoing
from agentlightning.llm_proxy.backends.clock import Alarm

PATIENCE_SECONDS = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that is about to happen."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        await asyncio.sleep(0.001)


@dataclass
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Act = Callable[[Received, asyncio.StreamWriter], Awaitable[object]]
"""Answers one request; an act that closes the writer ends the connection."""


def reply(status: int = 200, body: bytes = b'{"ok": true}', headers: Mapping[str, str] | None = None) -> Act:
    """A whole answer."""

    async def act(request: Received, out: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} Word", f"Content-Length: {len(body)}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        out.write("\r\n".join([*lines, "", ""]).encode() + body)

    return act


async def hang(request: Received, out: asyncio.StreamWriter) -> None:
    """No answer, ever."""
    await asyncio.Event().wait()


async def drop(request: Received, out: asyncio.StreamWriter) -> None:
    """The end of the connection instead of an answer."""
    out.close()


async def halve(request: Received, out: asyncio.StreamWriter) -> None:
    """The beginning of an answer, and the end of the connection."""
    out.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    await out.drain()
    out.close()


async def garble(request: Received, out: asyncio.StreamWriter) -> None:
    """Something else than HTTP."""
    out.write(b"\x00\x01 what is this\r\n\r\n")
    await out.drain()
    out.close()


async def trickle(request: Received, out: asyncio.StreamWriter) -> None:
    """One chunk of an answer, and silence."""
    out.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
    await asyncio.Event().wait()


def after(event: asyncio.Event, act: Act) -> Act:
    """The act, once the event has been set."""

    async def later(request: Received, out: asyncio.StreamWriter) -> None:
        await event.wait()
        await act(request, out)

    return later


class ScriptedServer:
    """Answers POSTs with the acts of its script, the last one for ever, and GETs as long as it is well."""

    def __init__(self, *script: Act) -> None:
        self.script = list(script) or [reply()]
        self.received: list[Received] = []
        self.health_checks: list[Received] = []
        self.health_status = 200
        self.in_flight = 0
        self.most_in_flight = 0
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> "ScriptedServer":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop_listening(self) -> None:
        """Take no new connection."""
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        if server is not None:
            await server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def entry(self, model_name: str = "m", **params: Any) -> dict[str, Any]:
        """An entry of a model list that leads here."""
        return {"model_name": model_name, "litellm_params": {"model": "hosted_vllm/up", "api_base": self.url, **params}}

    def _connected(self, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, out))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (request := await self._request(reader)) is not None and not out.is_closing():
                await self._answer(request, reader, out)
        except ConnectionError:
            pass
        finally:
            self.connections -= 1
            out.transport.abort()

    async def _request(self, reader: asyncio.StreamReader) -> Received | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            return None
        method, path, _ = head[0].split(" ")
        pairs = [line.partition(": ") for line in head[1:] if line]
        headers = {name.lower(): value for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Received(method, path, headers, body)

    async def _answer(self, request: Received, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            self.health_checks.append(request)
            await reply(self.health_status)(request, out)
            return
        self.received.append(request)
        act = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        acting = asyncio.ensure_future(self._act(act, request, out))
        leaving = asyncio.ensure_future(self._left(reader))
        try:
            await asyncio.wait([acting, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (acting, leaving):
                task.cancel()
            await asyncio.wait([acting, leaving])
        if not acting.cancelled():
            acting.result()
        if reader.at_eof():
            out.close()

    async def _act(self, act: Act, request: Received, out: asyncio.StreamWriter) -> None:
        """Answer; whoever has the answer finds the call no longer in flight."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await act(request, out)
        finally:
            self.in_flight -= 1

    async def _left(self, reader: asyncio.StreamReader) -> None:
        """Wait until the client has gone: nothing else comes from it before it has its answer."""
        while not reader.at_eof():
            await asyncio.sleep(0.002)


class TurnedClock(Clock):
    """A clock that stands still until it is turned, and then rings what is due."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.alarms: list[TurnedAlarm] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        rung = asyncio.get_running_loop().create_future()
        alarm = self.call_later(seconds, lambda: rung.done() or rung.set_result(None))
        try:
            await rung
        finally:
            alarm.cancel()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Alarm:
        alarm = TurnedAlarm(self, self.time + seconds, callback)
        self.alarms.append(alarm)
        return alarm

    def turn(self, seconds: float) -> None:
        ends = self.time + seconds
        while due := [alarm for alarm in self.alarms if alarm.rings_at <= ends]:
            first = min(due, key=lambda alarm: alarm.rings_at)
            self.alarms.remove(first)
            self.time = max(self.time, first.rings_at)
            first.callback()
        self.time = ends


class TurnedAlarm:
    """One thing to happen when the clock has been turned far enough."""

    def __init__(self, clock: TurnedClock, rings_at: float, callback: Callable[[], object]) -> None:
        self.clock = clock
        self.rings_at = rings_at
        self.callback = callback

    def cancel(self) -> None:
        if self in self.clock.alarms:
            self.clock.alarms.remove(self)


def chat(backend: Backend) -> Outgoing:
    return Outgoing("chat", b"{}", stream=False)


def ask_for(model: str = "m", who: str = "", **fields: Any) -> Ask:
    return Ask(model, who, fields.pop("prepare", chat), **fields)
