"""What the tests of events share: stores of every kind, and rollouts with spans."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agentlightning.types import AttemptedRollout, Span
from tests.contract.remote import start_remote


@pytest.fixture(params=["sqlite", "client-ws", "client-http"])  # the clients' server has the memory store
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    built: LightningStore = InMemoryLightningStore()
    if request.param == "sqlite":
        built = SqliteLightningStore(tmp_path / "store.db")
    elif request.param.startswith("client"):
        built = await start_remote(built, request.param.removeprefix("client-"))
    yield built
    await built.close()


def message_span(rollout: AttemptedRollout, text: str, number: int, **changes: Any) -> Span:
    """A span that says one thing."""
    owner = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    fields: dict[str, Any] = {"name": "agentlightning.message", "sequence_id": number, "end_time": float(number)}
    return Span.from_attributes(attributes={"message": text}, **owner, **{**fields, **changes})


async def say(store: LightningStore, rollout: AttemptedRollout, *texts: str) -> None:
    """Add a message to a rollout for each text."""
    for number, text in enumerate(texts, 1):
        await store.add_span(message_span(rollout, text, number))


async def finish(store: LightningStore, rollout: AttemptedRollout) -> None:
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
