"""Old clients and new runners at one store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.results import rollout_from_result
from agentlightning.legacy.server import AgentLightningServer
from agentlightning.semconv import AGL_REWARD
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.types import (
    AttemptedRollout,
    RolloutConfig,
    RolloutLegacy,
    Span,
    Triplet,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
async def server(store: InMemoryLightningStore) -> AsyncIterator[AgentLightningServer]:
    server = AgentLightningServer(port=0, store=store)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: AgentLightningServer) -> AsyncIterator[AgentLightningClient]:
    async with AgentLightningClient(server.endpoint, poll_interval=0.01) as client:
        yield client


@asynccontextmanager
async def remote(store: InMemoryLightningStore) -> AsyncIterator[LightningStoreClient]:
    """The store as seen from another machine."""
    server = LightningStoreServer(store, "127.0.0.1", 0)
    await server.start()
    client = LightningStoreClient(server.endpoint)
    yield client
    await client.close()
    await server.stop()


async def run_modern(store: InMemoryLightningStore, make_span: Any, status: Any = "succeeded") -> AttemptedRollout:
    claim = await store.dequeue_rollout("runner-1")
    assert claim is not None
    await store.add_span(make_span(claim, 1))
    await store.add_span(make_span(claim, 2, name=AGL_REWARD, attributes={"reward": 0.75}))
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=status, metadata={"host": "a"})
    return claim


async def test_a_rollout_of_the_store_is_done_by_a_client_of_the_protocol(
    store: Any, client: AgentLightningClient
) -> None:
    rollout = await store.enqueue_rollout({"q": 1}, "val", "rs-1", None, {"k": "v"})

    task = await client.poll_next_task_async()
    assert task is not None
    (attempt,) = await store.query_attempts(rollout.rollout_id)
    await client.post_rollout_async(rollout_from_result(task, 0.5))

    assert (task.rollout_id, task.input, task.mode) == (rollout.rollout_id, {"q": 1}, "val")
    assert (task.resources_id, task.metadata, task.num_claims) == ("rs-1", {"k": "v"}, 1)
    assert (attempt.status, attempt.worker_id) == ("preparing", "legacy-127.0.0.1")
    (done,) = await store.wait_for_rollouts([rollout.rollout_id], timeout=5)
    (reward,) = await store.query_spans(rollout.rollout_id, "latest")
    assert (done.status, done.attempt.status) == ("succeeded", "succeeded")
    assert (reward.name, reward.attributes) == (AGL_REWARD, {"reward": 0.5})


async def test_a_result_of_a_runner_comes_back_through_the_protocol(
    store: Any, server: AgentLightningServer, make_span: Any
) -> None:
    rollout_id = await server.queue_task({"q": 1}, mode="train", metadata={"k": "v"})
    await run_modern(store, make_span)

    result = await server.poll_completed_rollout(rollout_id, timeout=5)

    assert result is not None
    assert result.task is not None
    assert (result.rollout_id, result.final_reward) == (rollout_id, 0.75)
    assert (result.task.input, result.task.mode, result.task.metadata) == ({"q": 1}, "train", {"k": "v"})
    assert [entry["name"] for entry in result.trace or ()] == ["step", AGL_REWARD]
    assert result.metadata == {"host": "a", "status": "succeeded"}
    assert await server.get_completed_rollout(rollout_id) is None


async def test_a_cancelled_task_is_a_result_without_a_trace(store: Any, server: AgentLightningServer) -> None:
    rollout_id = await server.queue_task("hello")
    await store.update_rollout(rollout_id, status="cancelled")

    result = await server.poll_completed_rollout(rollout_id, timeout=5)

    assert result is not None
    assert (result.metadata["status"], result.trace) == ("cancelled", [])
    assert await server.get_completed_rollout(rollout_id) is None


async def test_a_result_whose_spans_were_dropped_has_no_trace(server: AgentLightningServer, make_span: Any) -> None:
    store = InMemoryLightningStore(
        eviction_memory_threshold=1, safe_memory_threshold=0, span_size_estimator=lambda span: 1
    )
    bridge = AgentLightningServer(port=0, store=store)
    await bridge.start()
    rollout_id = await bridge.queue_task("hello")
    await run_modern(store, make_span)

    result = await bridge.get_completed_rollout(rollout_id)

    await bridge.stop()
    assert result is not None
    assert (result.trace, result.metadata["status"]) == (None, "succeeded")


async def test_runners_and_clients_share_one_queue(
    store: Any, server: AgentLightningServer, client: AgentLightningClient, make_span: Any
) -> None:
    expected = {await server.queue_task(number) for number in range(8)}

    async def runner() -> list[str]:
        return [(await run_modern(store, make_span)).rollout_id for _ in range(4)]

    async def old_client() -> list[str]:
        done = []
        for _ in range(4):
            task = await client.poll_next_task_async()
            assert task is not None
            await client.post_rollout_async(rollout_from_result(task, 1.0))
            done.append(task.rollout_id)
        return done

    by_runner, by_client = await asyncio.gather(runner(), old_client())

    assert {*by_runner, *by_client} == expected
    assert len(await server.retrieve_completed_rollouts()) == 8


async def test_a_rollout_keeps_the_patience_it_was_given(clock: Any) -> None:
    store = InMemoryLightningStore(clock=clock)
    server = AgentLightningServer(port=0, task_timeout_seconds=10.0, store=store)
    await server.start()
    async with AgentLightningClient(server.endpoint) as client:
        patient = await store.enqueue_rollout("hello", config=RolloutConfig(timeout_seconds=100.0))
        await client.poll_next_task_async()
    clock.advance(50.0)

    rollout = await store.get_rollout_by_id(patient.rollout_id)

    await server.stop()
    assert rollout is not None
    assert rollout.status == "preparing"


async def test_posted_triplets_are_model_calls_with_their_rewards(
    store: Any, server: AgentLightningServer, client: AgentLightningClient
) -> None:
    rollout_id = await server.queue_task("hello")
    triplets = [
        Triplet(prompt={"token_ids": [1, 2]}, response={"token_ids": [3]}, reward=0.5, metadata={"response_id": "a"}),
        Triplet(prompt="Hi", response="Hello"),
    ]

    await client.post_rollout_async(RolloutLegacy(rollout_id=rollout_id, triplets=triplets, final_reward=1.0))

    spans: list[Span] = list(await store.query_spans(rollout_id, "latest"))
    assert [span.name for span in spans] == ["openai.chat.completion", AGL_REWARD] * 2
    read, other = TracerTraceToTriplet().adapt(spans)
    assert (read.prompt["token_ids"], read.response["token_ids"], read.reward) == ([1, 2], [3], 0.5)
    assert (read.metadata["response_id"], other.prompt["raw_content"][0]["content"]) == ("a", "Hi")
    assert [spans[1].attributes["reward"], spans[3].attributes["reward"]] == [0.5, 1.0]
    assert [span.sequence_id for span in spans] == [1, 2, 3, 4]
    assert spans == sorted(spans, key=lambda span: span.start_time or 0.0)


async def test_the_protocol_can_be_served_from_a_store_on_another_machine(store: Any, make_span: Any) -> None:
    async with remote(store) as far:
        bridge = AgentLightningServer(port=0, store=far)
        await bridge.start()
        by_client, by_runner = [await bridge.queue_task(number) for number in range(2)]
        polling = [
            asyncio.create_task(bridge.poll_completed_rollout(each, timeout=30)) for each in (by_client, by_runner)
        ]
        async with AgentLightningClient(bridge.endpoint) as client:
            task = await client.poll_next_task_async()
            assert task is not None
            await client.post_rollout_async(rollout_from_result(task, 1.0))
        await run_modern(store, make_span)

        results = await asyncio.gather(*polling)
        unknown = await bridge.poll_completed_rollout("rollout-none", timeout=0.05)

        await bridge.stop()
    assert [result.final_reward for result in results if result] == [1.0, 0.75]
    assert unknown is None
