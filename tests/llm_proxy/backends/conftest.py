"""Servers and fleets that a test need not clean up, and a look at what they leave behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from agentlightning.llm_proxy.backends import Fleet
from tests.llm_proxy.backends.turned_clock import TurnedClock
from tests.stub_model.raw import whole
from tests.stub_model.script import Handler, Script
from tests.stub_model.server import StubModel

Serve = Callable[..., Awaitable[StubModel]]
MakeFleet = Callable[..., Fleet]

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
async def make_fleet() -> AsyncIterator[MakeFleet]:
    """Makes a fleet of entries or servers; when the test ends, closes it and sees that no task is left."""
    before = asyncio.all_tasks()
    fleets: list[Fleet] = []

    def make(*backends: StubModel | dict[str, Any], **options: Any) -> Fleet:
        entries = [backend.entry() if isinstance(backend, StubModel) else backend for backend in backends]
        fleet = Fleet(entries, **options)
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        await fleet.close()
    left = [task for task in asyncio.all_tasks() - before if "fleet" in repr(task) or "health" in repr(task)]
    assert left == []


@pytest.fixture
def turned_clock() -> TurnedClock:
    return TurnedClock()
