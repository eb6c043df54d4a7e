"""The back ends over which the contract suites run; a new one is one more line."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreThreaded,
    SqliteLightningStore,
)
from tests.contract.remote import start_remote
from tests.postgres import open_postgres

FoundT = TypeVar("FoundT")

MAX_SPAN_BYTES = 1024**2
BACKENDS: dict[str, Callable[..., LightningStore]] = {
    "memory": lambda path, **options: InMemoryLightningStore(**options),
    "sqlite": lambda path, **options: SqliteLightningStore(path, **options),
    "sqlite-power": lambda path, **options: SqliteLightningStore(path, durability="power", **options),
    "sqlite-memory": lambda path, **options: SqliteLightningStore(**options),
    "postgres": lambda path, **options: open_postgres(**options),
    "threaded": lambda path, **options: LightningStoreThreaded(InMemoryLightningStore(**options)),
}
"""Made with a path and the options of `LocalStore`."""
REMOTE = {
    "client-memory": ("memory", "auto"),
    "client-memory-http": ("memory", "http"),
    "client-sqlite": ("sqlite", "ws"),
}
"""The same over the network: the back end of the server, and the client's transport."""

IN_EVERY_SUITE = ("memory", "sqlite", "postgres", "client-memory")
IN_SOME_SUITES = {"test_claims": [name for name in (*BACKENDS, *REMOTE) if name not in IN_EVERY_SUITE]}
"""The others are the same code with another wrapper or setting. `test_model` and `test_threads` have lists of their
own."""


def known(found: FoundT | None) -> FoundT:
    """What was looked for, and must have been found."""
    assert found is not None
    return found


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
    built = BACKENDS[backend](tmp_path / "store.db", clock=clock, max_span_bytes=MAX_SPAN_BYTES)
    if transport is not None:
        built = await start_remote(built, transport)
    yield built
    await built.close()
