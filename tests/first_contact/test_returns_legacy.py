"""The client of the v0.1 protocol, as the design's samples use it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.client import AgentLightningClient
from agentlightning.server import AgentLightningServer

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


@asynccontextmanager
async def serving() -> AsyncIterator[AgentLightningServer]:
    server = AgentLightningServer(host="127.0.0.1", port=0)
    await server.start()
    yield server
    await server.stop()


class Shouting(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> str:
        return f"{task.input.upper()}!"


def work(endpoint: str) -> None:
    """The sample: poll, ask for resources, run the agent, post what it returned."""
    with AgentLightningClient(endpoint=endpoint, poll_interval=0.05) as client:
        task = client.poll_next_task()
        assert task is not None
        resources = client.get_resources_by_id(task.resources_id)
        result = Shouting().rollout(task, resources, None)
        client.post_rollout(result)


async def test_a_client_posts_what_its_agent_returned() -> None:
    async with serving() as server:
        rollout_id = await server.queue_task("hello")

        await asyncio.to_thread(work, server.endpoint)

        result = await server.get_completed_rollout(rollout_id)
        rollout = await server.store.get_rollout_by_id(rollout_id)

    assert result is not None
    assert result.metadata == {"result": "HELLO!"}
    assert rollout is not None
    assert (rollout.status, rollout.output) == ("succeeded", "HELLO!")


async def test_a_client_that_posts_a_number_gives_the_reward() -> None:
    async with serving() as server:
        rollout_id = await server.queue_task("hello")
        async with AgentLightningClient(server.endpoint, poll_interval=0.05) as client:
            await client.poll_next_task_async()

            await client.post_rollout_async(0.5)

        result = await server.get_completed_rollout(rollout_id)

    assert result is not None
    assert result.final_reward == 0.5


def test_an_address_without_http_is_refused_when_the_client_is_made() -> None:
    with pytest.raises(agl.errors.ConfigurationError, match="for example http://localhost:8000"):
        AgentLightningClient("localhost:8000")


def test_a_result_that_is_lost_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with AgentLightningClient("http://127.0.0.1:9", poll_interval=0.01) as client:
        client.post_rollout({"rollout_id": "rollout-7", "final_reward": 1.0})

    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "The result of rollout-7 could not be delivered" in warning


@pytest.mark.claim(501)
async def test_a_task_that_no_client_can_read_is_refused_when_it_is_queued() -> None:
    async with serving() as server:
        with pytest.raises(agl.errors.InvalidValue, match="cannot be sent to clients as JSON"):
            await server.queue_task(object())

        async with AgentLightningClient(server.endpoint) as client:
            assert await client.poll_next_task_async(timeout=0) is None
