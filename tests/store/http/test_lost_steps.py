"""Calls whose answers do not arrive: a change is made once, and no rollout or notice is lost for good."""

import asyncio
from typing import Any

import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.store import InMemoryLightningStore, LightningStoreClient
from agentlightning.types import AttemptedRollout
from tests.e2e.test_network_faults import QUICK, TRANSPORTS, _until, network

IMPATIENT: dict[str, Any] = {"retry_delays": (0.05,), "health_retry_delays": (0.05,), "outage_seconds": 0.0}


async def stocked_store(clock: Any = None) -> tuple[InMemoryLightningStore, AttemptedRollout]:
    """A store with one rollout at work and one in the queue."""
    store = InMemoryLightningStore(clock=clock)
    held = await store.start_rollout("held", worker_id="w")
    await store.enqueue_rollout("next")
    return store, held


def finishing(client: LightningStoreClient, held: AttemptedRollout, **options: Any) -> "asyncio.Task[Any]":
    step = client.finish_and_claim(held.rollout_id, held.attempt.attempt_id, "succeeded", worker_id="w", **options)
    return asyncio.create_task(step)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_step_is_sent_again_and_acts_once(transport: Any) -> None:
    store, held = await stocked_store()
    await store.enqueue_rollout("last")

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **QUICK) as client:
        await client.statistics()
        proxy.hold_replies()
        step = finishing(client, held)
        await _until(store, queue_length=1)
        await proxy.refuse()
        await proxy.listen()
        claim = await step

    assert claim.rollout.input == "next"
    assert (await store.statistics())["queue_length"] == 1


@pytest.mark.timeout(40)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_step_that_was_given_up_is_made_again_by_its_id(transport: Any) -> None:
    store, held = await stocked_store()

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **IMPATIENT) as client:
        await client.statistics()
        proxy.hold_replies()
        step = finishing(client, held, claim_id="0:1")
        await _until(store, queue_length=0)
        await proxy.refuse()
        with pytest.raises(StoreUnavailable):
            await step
        await proxy.listen()
        assert await client.claim_rollouts(worker_id="w", claim_id="1:1") == []
        claim = await finishing(client, held, claim_id="0:1")

    assert (claim.rollout.input, claim.rollout.attempt.sequence_id) == ("next", 1)
    finished = await store.get_rollout_by_id(held.rollout_id)
    assert finished is not None
    assert finished.status == "succeeded"


@pytest.mark.timeout(40)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_claim_of_a_step_that_was_cancelled_comes_back_with_its_lease(transport: Any, clock: Any) -> None:
    store, held = await stocked_store(clock)

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **QUICK) as client:
        await client.statistics()
        proxy.hold_replies()
        step = finishing(client, held, heartbeat_interval=10)
        await _until(store, queue_length=0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        proxy.release_replies()
        clock.advance(301)
        await _until(store, queue_length=1)

    assert (await store.get_rollout_by_id(held.rollout_id)).status == "succeeded"  # type: ignore[union-attr]


@pytest.mark.timeout(40)
async def test_claims_of_one_client_at_once_overtake_none_of_them(serve: Any, connect: Any) -> None:
    server = await serve()
    client = connect(server.endpoint)
    waiting = [asyncio.create_task(client.dequeue_rollout("w", wait=30.0)) for _ in range(5)]
    for number in range(10):
        await server.enqueue_rollout(number)
    claims = [*await asyncio.gather(*waiting), *[await client.dequeue_rollout("w") for _ in range(5)]]

    assert sorted(claim.input for claim in claims) == list(range(10))


@pytest.mark.timeout(40)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_change_whose_answer_was_lost_is_made_once(transport: Any) -> None:
    store = InMemoryLightningStore()

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **QUICK) as client:
        await client.statistics()
        proxy.hold_replies()
        asking = asyncio.create_task(client.enqueue_rollout("a"))
        await _until(store, queue_length=1)
        await proxy.refuse()
        await proxy.listen()
        enqueued = await asking

    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [enqueued.rollout_id]


@pytest.mark.timeout(40)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_impatient_reader_loses_no_notice(transport: Any) -> None:
    store = InMemoryLightningStore()

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **QUICK) as client:
        await client.statistics()
        proxy.hold_replies()
        notices: Any = client.subscribe(["rollout"])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(notices.__anext__(), 0.2)
        await proxy.holds_reply.wait()
        await store.enqueue_rollout("a", rollout_id="r")
        proxy.release_replies()

        assert (await asyncio.wait_for(notices.__anext__(), 30)).rollout_id == "r"
        await notices.aclose()
