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
from tests.contract.remote import start_remote
from tests.postgres import open_postgres

BACKENDS: dict[str, Callable[[Path, Callable[[], float]], LightningStore]] = {
    "memory": lambda folder, clock: InMemoryLightningStore(clock=clock),
    "sqlite": lambda folder, clock: SqliteLightningStore(folder / "store.db", clock=clock),
    "sqlite-power": lambda folder, clock: SqliteLightningStore(folder / "store.db", clock=clock, durability="power"),
    "sqlite-memory": lambda folder, clock: SqliteLightningStore(clock=clock),
    "postgres": lambda folder, clock: open_postgres(clock=clock),
    "threaded": lambda folder, clock: LightningStoreThreaded(InMemoryLightningStore(clock=clock)),
}


REMOTE = {
    "client-memory": ("memory", "auto"),
    "client-memory-http": ("memory", "http"),
    "client-sqlite": ("sqlite", "ws"),
}
"""The same over the network: the back end of the server, and the client's transport."""

IN_EVERY_SUITE = ("memory", "sqlite", "postgres", "client-memory")
IN_SOME_SUITES = {
    "test_rollouts": [name for name in (*BACKENDS, *REMOTE) if name not in IN_EVERY_SUITE],
    "test_spans": ["client-memory-http"],
    "test_records": ["client-memory-http"],
}
"""The others are the same code with another wrapper or setting; between them these suites call every kind of operation,
each of which has a route. `test_model` and `test_threads` have lists of their own."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        suite = metafunc.module.__name__.rpartition(".")[2]
        metafunc.parametrize("store", [*IN_EVERY_SUITE, *IN_SOME_SUITES.get(suite, ())], indirect=True)


@pytest.fixture
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Callable[[], float]
) -> AsyncIterator[LightningStore]:
    """A new store of each kind."""
    backend, transport = REMOTE.get(request.param, (request.param, None))
    built = BACKENDS[backend](tmp_path, clock)
    if transport is not None:
        built = await start_remote(built, transport)
    yield built
    await built.close()
