"""What the tests of the store over the network share: servers on free ports, clients, sessions, and patience."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer

Serve = Callable[..., Awaitable[LightningStoreServer]]
Connect = Callable[..., LightningStoreClient]
Eventually = Callable[..., Awaitable[None]]
Script = Callable[..., Awaitable[tuple[str, Counter[str]]]]


@pytest.fixture(scope="module")
def server() -> Iterator[LightningStoreServer]:
    """One server for the tests of a module, which must not mind what others left in its store."""
    started = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
    asyncio.run(started.start())
    yield started
    asyncio.run(started.stop())


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers of a store, a new one in memory by default, and stops them in the end."""
    servers: list[LightningStoreServer] = []

    async def start(store: LightningStore | None = None, **options: Any) -> LightningStoreServer:
        server = LightningStoreServer(store or InMemoryLightningStore(), "127.0.0.1", options.pop("port", 0), **options)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes clients with little patience, and closes them in the end."""
    clients: list[LightningStoreClient] = []

    def make(address: str, **options: Any) -> LightningStoreClient:
        patience = {"retry_delays": (0.01, 0.01), "health_retry_delays": (0.01, 0.01)}
        clients.append(LightningStoreClient(address, **{**patience, **options}))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client that knows nothing of us."""
    async with aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=["Accept-Encoding"]) as opened:
        yield opened


class Wire:
    """A connection to a server that can lose what the server says, or hold it back."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self.loses = False
        """Whether connections break at the moment the server answers."""
        self.delivers = asyncio.Event()
        """Cleared, answers wait."""
        self.delivers.set()
        self.lost = 0
        self.held = 0
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            above, below = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        self._writers.append(below)
        pairs = (self._pass(reader, below, writer, is_answer=False), self._pass(above, writer, below, is_answer=True))
        for pumping in pairs:
            task = asyncio.create_task(pumping)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, back: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if is_answer and not self.delivers.is_set():
                    self.held += 1
                    await self.delivers.wait()
                if is_answer and self.loses:
                    self.lost += 1
                    break
                sink.write(data)
                await sink.drain()
        for end in (sink, back):
            end.close()

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*[writer.wait_closed() for writer in self._writers], return_exceptions=True)


@pytest.fixture
async def wire_to() -> AsyncIterator[Callable[[LightningStoreServer], Awaitable[Wire]]]:
    """Puts a wire before a server; its `url` is what clients then use."""
    async with AsyncExitStack() as stack:

        async def lay(server: LightningStoreServer) -> Wire:
            wire = Wire(server.port)
            listening = await asyncio.start_server(wire.open, "127.0.0.1", 0)
            stack.push_async_callback(wire.close)
            stack.callback(listening.close)
            wire.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            return wire

        yield lay


@pytest.fixture
async def scripted() -> AsyncIterator[Script]:
    """Starts servers that answer every call with the next of some statuses, the last for ever, and count requests."""
    runners: list[web.AppRunner] = []

    async def start(*statuses: int, health: int = 200, upgrade: int = 404) -> tuple[str, Counter[str]]:
        counts: Counter[str] = Counter()

        async def answer(request: web.Request) -> web.Response:
            counts[request.path] += 1
            if request.path == "/health":
                return web.json_response({}, status=health)
            if "Upgrade" in request.headers:
                return web.Response(status=upgrade)
            status = statuses[min(counts[request.path], len(statuses)) - 1]
            body = {"total_rollouts": 7} if status == 200 else {"detail": "no", "error_type": "Strange"}
            return web.json_response(body, status=status)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}", counts

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def eventually() -> Eventually:
    """Waits until a condition holds, for as long as a slow machine may need."""

    async def wait(holds: Callable[[], Any], *, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it did not happen in time"
            await asyncio.sleep(0.005)

    return wait
