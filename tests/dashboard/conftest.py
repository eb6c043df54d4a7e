"""What the tests of the dashboard share: a browser, pages, servers on free ports, and stores with something in them."""

import fcntl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreServer, SqliteLightningStore
from agentlightning.types import AttemptedRollout, Span
from tests import warm_python
from tests.dashboard.browser import Page, chromium_path, open_page, running_browser

Serve = Callable[..., Awaitable[LightningStoreServer]]
FAILURE = "the <b>tool</b> is down"
"""What an agent of the real training raises once."""
TRAINING_SECONDS = 300.0
"""How long the training of `trained_file` may take."""


@pytest.fixture(scope="session")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One browser for all tests of a process."""
    if chromium_path() is None:
        pytest.skip("There is no Chromium on this machine; install it with `make browser`.")
    with running_browser(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
async def page(devtools: str) -> AsyncIterator[Page]:
    """A page of its own for every test; it must not have complained about anything."""
    async with open_page(devtools) as opened:
        yield opened
        assert opened.problems == []


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers of a store, a new one in memory by default, and stops them in the end."""
    servers: list[LightningStoreServer] = []

    async def start(store: LightningStore | None = None, *, port: int = 0, **options: Any) -> LightningStoreServer:
        server = LightningStoreServer(store or InMemoryLightningStore(), "127.0.0.1", port, **options)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture(scope="session")
def trained_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that real trainings have filled, once for all processes that run the tests."""
    pytest.importorskip("torch", reason="the training needs torch")
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base
    file = folder / "trained.db"
    with (folder / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            made = folder / "training.db"
            command = [sys.executable, "-m", "tests.dashboard.training", str(made)]
            warm_python.run(command, check=True, timeout=TRAINING_SECONDS, kind=warm_python.TorchPopen)
            made.rename(file)
    return file


@pytest.fixture
async def trained(trained_file: Path, serve: Serve) -> LightningStoreServer:
    """A server of that store."""
    return await serve(SqliteLightningStore(trained_file))


def span_of(rollout: AttemptedRollout, name: str, attributes: dict[str, Any], **fields: Any) -> Span:
    """A span of the latest attempt of a rollout."""
    ids: dict[str, Any] = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    made = Span.from_attributes(name=name, attributes=attributes, sequence_id=fields.pop("sequence_id", 1), **ids)
    return made.model_copy(update=fields)


def reward_span(rollout: AttemptedRollout, reward: float) -> Span:
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": reward}
    return span_of(rollout, "agentlightning.reward", attributes, sequence_id=9)


async def finished(store: LightningStore, task: Any, reward: float = 1.0, **options: Any) -> AttemptedRollout:
    """A rollout that somebody has carried out."""
    rollout = await store.start_rollout(task, **options)
    await store.add_span(reward_span(rollout, reward))
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    return rollout


async def failed(store: LightningStore, task: Any, message: str) -> AttemptedRollout:
    """A rollout whose agent raised."""
    rollout = await store.start_rollout(task)
    noted = {"error": {"type": "ValueError", "message": message, "traceback": f"Traceback\n{message}"}}
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed", metadata=noted)
    return rollout
