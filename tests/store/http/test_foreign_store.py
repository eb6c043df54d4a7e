"""Stores of other people behind our server: not thread-safe, knowing no ids of callers, only what 0.2 knew."""

import asyncio
import time
from typing import Any

import pytest
import requests

from agentlightning.store import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, Rollout

both_transports = pytest.mark.parametrize("transport", ["http", "ws"])


class Foreign(LightningStore):
    """A queue and nothing else, as somebody might write it who never heard of threads or retries."""

    def __init__(self) -> None:
        self.queue: list[Rollout] = []
        self.claimed: dict[str, Rollout] = {}
        self.calls = 0
        self.inside = 0
        self.most_inside = 0

    async def enqueue_rollout(self, input: Any, *args: Any, **options: Any) -> Rollout:
        self.inside += 1
        self.calls += 1
        self.most_inside = max(self.most_inside, self.inside)
        await asyncio.sleep(0)
        self.queue.append(Rollout(rollout_id=f"ro-{self.calls}", input=input, start_time=1.0))
        self.inside -= 1
        return self.queue[-1]

    async def dequeue_rollout(self, worker_id: str | None = None, *, wait: float | None = None) -> Any:
        deadline = time.monotonic() + (wait or 0.0)
        while not self.queue and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if not self.queue:
            return None
        rollout = self.queue.pop(0)
        attempt = Attempt(rollout_id=rollout.rollout_id, attempt_id="at-1", sequence_id=1, start_time=1.0)
        self.claimed[rollout.rollout_id] = rollout
        return AttemptedRollout(**rollout.model_dump(), attempt=attempt)

    async def update_rollout(self, rollout_id: str, **changes: Any) -> Any:
        self.queue.append(self.claimed.pop(rollout_id))
        return self.queue[-1]


class Old(LightningStore):
    """With the signatures of the 0.2 release."""

    async def dequeue_rollout(self) -> Any:  # type: ignore[override]
        return None

    async def query_rollouts(self, *, status: Any = None, rollout_ids: Any = None) -> Any:  # type: ignore[override]
        return []


async def test_store_that_counts_nothing_is_ready_all_the_same(serve: Any) -> None:
    server = await serve(Foreign())

    answers = [await asyncio.to_thread(requests.get, f"{server.endpoint}/{path}") for path in ("ready", "metrics")]

    assert [answer.status_code for answer in answers] == [200, 200]


@both_transports
async def test_store_with_the_old_signatures_is_served(transport: str, serve: Any, connect: Any) -> None:
    client = connect((await serve(Old())).endpoint, transport=transport)

    assert await client.dequeue_rollout() is None
    assert await client.query_rollouts(status=["queuing"]) == []
