"""A store of each kind that the notes name: in memory, in SQLite, behind a server by HTTP and by WebSocket."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from tests.contract.remote import start_remote


@pytest.fixture(params=["memory", "sqlite", "http", "websocket"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Callable[[], float]
) -> AsyncIterator[LightningStore]:
    built: LightningStore = InMemoryLightningStore(clock=clock)
    if request.param == "sqlite":
        built = SqliteLightningStore(tmp_path / "store.db", clock=clock)
    elif request.param != "memory":
        built = await start_remote(built, "http" if request.param == "http" else "ws")
    yield built
    await built.close()
