"""The back ends over which the contract suites run; a new one is one more line."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreThreaded,
    SqliteLightningStore,
)

BACKENDS: dict[str, Callable[[Path, Callable[[], float]], LightningStore]] = {
    "memory": lambda folder, clock: InMemoryLightningStore(clock=clock),
    "sqlite": lambda folder, clock: SqliteLightningStore(folder / "store.db", clock=clock),
    "sqlite-power": lambda folder, clock: SqliteLightningStore(folder / "store.db", clock=clock, durability="power"),
    "sqlite-memory": lambda folder, clock: SqliteLightningStore(clock=clock),
    "threaded": lambda folder, clock: LightningStoreThreaded(InMemoryLightningStore(clock=clock)),
}


@pytest.fixture(params=BACKENDS)
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Callable[[], float]
) -> AsyncIterator[LightningStore]:
    """A new store of each kind."""
    built = BACKENDS[request.param](tmp_path, clock)
    yield built
    await built.close()
