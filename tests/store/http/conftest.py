"""What the tests of the store over the network share: servers on free ports, clients, sessions, and patience."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
import yarl
from aiohttp import web

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer

Serve = Callable[..., Awaitable[LightningStoreServer]]
Connect = Callable[..., LightningStoreClient]
Eventually = Callable[..., Awaitable[None]]
Script = Callable[..., Awaitable[tuple[str, Counter[str]]]]


async def call(
    session: aiohttp.ClientSession, method: str, server: LightningStoreServer, path: str, **options: Any
) -> tuple[int, Any]:
    """One request; its status and its JSON."""
    async with session.request(method, yarl.URL(server.endpoint + path, encoded=True), **options) as response:
        return response.status, await response.json(content_type=None)


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
