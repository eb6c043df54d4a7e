"""Stores of other people behind our server, which know only what 0.2 knew."""

import asyncio
from typing import Any

import pytest
import requests

from tests.store.test_composed import OldStore


@pytest.mark.parametrize("transport", ["http", "ws"])
async def test_store_with_the_old_signatures_is_served_and_ready(transport: str, serve: Any, connect: Any) -> None:
    server = await serve(OldStore())
    client = connect(server.endpoint, transport=transport)

    answers = [await asyncio.to_thread(requests.get, f"{server.endpoint}/{path}") for path in ("ready", "metrics")]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert await client.dequeue_rollout() is None
    rollout = await client.enqueue_rollout("a")
    assert [found.rollout_id for found in await client.query_rollouts(status=["queuing"])] == [rollout.rollout_id]
