"""What the tests of the dashboard share: a browser, pages, servers on free ports, and stores with something in them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreServer
from agentlightning.types import AttemptedRollout, Span
from tests.dashboard.browser import Page, chromium_path, open_page, running_browser

Serve = Callable[..., Awaitable[LightningStoreServer]]


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One browser for the tests of a module."""
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
