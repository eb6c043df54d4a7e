"""Servers and pools that a test need not clean up, and a look at what they leave behind."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from agentlightning.llm_proxy.backends import BackendPool
from tests.llm_proxy.backends.fake_clock import FakeClock
from tests.stub_model.raw import whole
from tests.stub_model.script import Handler, Script
from tests.stub_model.server import StubModel

Serve = Callable[..., Awaitable[StubModel]]
MakePool = Callable[..., BackendPool]

PROVIDER_VARIABLES = [
    f"{provider}_{part}"
    for provider in ("OPENAI", "ANTHROPIC", "AZURE", "HOSTED_VLLM")
    for part in ("API_KEY", "BASE_URL", "API_BASE", "API_VERSION")
]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key or address of the machine reaches a test."""
    for variable in PROVIDER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server with a script."""
    servers: list[StubModel] = []

    async def start(*script: Handler) -> StubModel:
        server = await StubModel(Script(script or (whole(),), repeats_last=True)).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def make_pool() -> AsyncIterator[MakePool]:
    """Makes a pool of entries or servers; when the test ends, closes it."""
    pools: list[BackendPool] = []

    def make(*backends: StubModel | dict[str, Any], **options: Any) -> BackendPool:
        entries = [backend.entry() if isinstance(backend, StubModel) else backend for backend in backends]
        pool = BackendPool(entries, **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        await pool.close()


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock()
