"""A store over a bad network: what was asked for happens once, whoever waits goes on by himself.

Two clients' worth of runners and an algorithm work through a proxy that loses, delays, cuts and doubles messages, and
must leave the same state behind as without it. Single faults that chance meets too rarely are made on purpose.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from agentlightning.store.claims import Claim
from agentlightning.types import EnqueueRolloutRequest
from tests.e2e.faulty_proxy import FAULTS, FaultyProxy
from tests.e2e.workload import final_state, fulfil, run_algorithm, run_runner

BACKENDS: dict[str, Callable[[Path], LightningStore]] = {
    "memory": lambda folder: InMemoryLightningStore(),
    "sqlite": lambda folder: SqliteLightningStore(folder / "s.db"),
}
QUICK: dict[str, Any] = {
    "retry_delays": (0.02,) * 40,
    "health_retry_delays": (0.05,) * 40,
    "outage_seconds": 20.0,
    "request_timeout": 5.0,
}
OUTAGE_SECONDS = 1.0
TRANSPORTS = ["http", "ws"]


@asynccontextmanager
async def network(store: LightningStore, **chance: Any) -> AsyncIterator[FaultyProxy]:
    """A server of a store, which stays open, and a proxy before it."""
    server = LightningStoreServer(store, "127.0.0.1", 0)
    await server.start()
    try:
        async with FaultyProxy(server.port, **chance) as proxy:
            yield proxy
    finally:
        await server.stop()


async def run_workload(url: str, transport: Any) -> None:
    """One client for the algorithm and one that three runners share."""
    leave = asyncio.Event()
    async with (
        LightningStoreClient(url, transport=transport, **QUICK) as algorithm,
        LightningStoreClient(url, transport=transport, **QUICK) as shared,
    ):
        runners = [
            asyncio.create_task(run_runner(shared, f"w-{n}", leave, wait=wait)) for n, wait in enumerate((None, 0.2, 2))
        ]
        await run_algorithm(algorithm)
        leave.set()
        await asyncio.gather(*runners)


async def expected_state() -> dict[str, Any]:
    """The outcome without any network."""
    store, leave = InMemoryLightningStore(), asyncio.Event()
    runner = asyncio.create_task(run_runner(store, "w", leave, wait=0.05))
    await run_algorithm(store)
    leave.set()
    await runner
    return await final_state(store)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "transport"), [("memory", "http"), ("sqlite", "ws")])
async def test_a_bad_network_leaves_the_same_state_as_a_good_one(backend: str, transport: str, tmp_path: Path) -> None:
    store = BACKENDS[backend](tmp_path)

    async with network(store, probability=0.05, seed=20260101) as proxy:
        await run_workload(proxy.url, transport)
        state = await final_state(store)

    assert state == await expected_state()
    assert set(proxy.happened) == set(FAULTS)


# ---------------------------------------------------------------------- outages


@pytest.mark.slow
async def test_runners_resume_by_themselves_after_an_outage() -> None:
    store = InMemoryLightningStore()
    transports: list[Any] = ["auto", "http", "ws"]

    async with network(store) as proxy:
        clients = [LightningStoreClient(proxy.url, transport=transport) for transport in transports]
        runners = [asyncio.create_task(_run_until_stopped(client, f"w-{n}")) for n, client in enumerate(clients)]
        before = [(await store.enqueue_rollout({"n": 1})).rollout_id for _ in range(40)]
        await store.wait_for_rollouts(before[:20])
        await proxy.refuse()
        during = [(await store.enqueue_rollout({"n": 1})).rollout_id for _ in range(20)]
        await asyncio.sleep(OUTAGE_SECONDS)
        await proxy.listen()
        finished = await store.wait_for_rollouts([*before, *during], timeout=20)
        for _ in runners:
            await store.enqueue_rollout({"n": "stop"})
        counts = await asyncio.gather(*runners)
        for client in clients:
            await client.close()

    assert {rollout.status for rollout in finished} == {"succeeded"}
    assert len(finished) == len(before) + len(during) == sum(counts)


async def _run_until_stopped(client: LightningStoreClient, worker_id: str) -> int:
    """A runner that goes on until it claims a rollout that says stop."""
    count = 0
    while True:
        claim = await client.dequeue_rollout(worker_id, wait=30)
        if claim is None:
            continue
        if claim.input["n"] == "stop":
            return count
        await fulfil(client, claim)
        count += 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_waits_and_subscriptions_survive_an_outage(transport: Any) -> None:
    store = InMemoryLightningStore()

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport) as client:
        changes: Any = client.subscribe(["rollout"])
        rollout = await client.enqueue_rollout({"n": 1})
        waiting = asyncio.create_task(client.wait_for_rollouts([rollout.rollout_id], timeout=None))
        first = await anext(changes)
        await proxy.refuse()
        await store.update_rollout(rollout.rollout_id, status="running")
        await asyncio.sleep(OUTAGE_SECONDS)
        await proxy.listen()
        second = await asyncio.wait_for(anext(changes), 10)
        await store.update_rollout(rollout.rollout_id, status="succeeded")
        third = await asyncio.wait_for(anext(changes), 10)
        finished = await asyncio.wait_for(waiting, 10)
        await changes.aclose()

    assert [notice.status for notice in (first, second, third)] == ["queuing", "running", "succeeded"]
    assert [done.rollout_id for done in finished] == [rollout.rollout_id]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_half_open_connection_is_noticed_by_the_request_timeout(transport: Any) -> None:
    store = InMemoryLightningStore()
    quick = QUICK | {"request_timeout": 0.5, "outage_seconds": 5.0}

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **quick) as client:
        await client.enqueue_rollout({"n": 1})
        assert proxy.freeze() > 0
        began = time.monotonic()
        await client.enqueue_rollout({"n": 2})
        seconds = time.monotonic() - began
        rollouts = await store.query_rollouts()

    assert [rollout.input["n"] for rollout in rollouts] == [1, 2]
    assert seconds < 15


# ---------------------------------------------------------------------- lost and doubled claims


@pytest.mark.parametrize(
    ("transport", "operation", "wait"), [("http", "dequeue_many_rollouts", None), ("ws", "claim_rollouts", 1.0)]
)
async def test_claims_of_a_caller_whose_patience_ended_are_given_again_by_their_ids(
    transport: Any, operation: str, wait: float | None
) -> None:
    store = InMemoryLightningStore()
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": n}) for n in range(4)])
    impatient: dict[str, Any] = {"retry_delays": (0.05,), "health_retry_delays": (0.05,), "outage_seconds": 0.0}

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **impatient) as client:

        def claiming() -> list[Any]:
            options: dict[str, Any] = {"limit": 1, "worker_id": "w", "wait": wait}
            return [getattr(client, operation)(**options, claim_id=f"{slot}:1") for slot in range(4)]

        await client.statistics()
        proxy.hold_replies()
        calls = [asyncio.create_task(call) for call in claiming()]
        await _until(store, queue_length=0)
        await proxy.refuse()
        lost = await asyncio.gather(*calls, return_exceptions=True)
        await proxy.listen()
        recovered = [each for call in claiming() for each in await call]

    assert [type(error) for error in lost] == [StoreUnavailable] * 4
    rollouts = [claim.rollout if isinstance(claim, Claim) else claim for claim in recovered]
    assert sorted((rollout.input["n"], rollout.attempt.sequence_id) for rollout in rollouts) == [
        (n, 1) for n in range(4)
    ]


@pytest.mark.parametrize(
    ("transport", "operation", "wait"), [("http", "dequeue_rollout", 5.0), ("ws", "dequeue_many_rollouts", None)]
)
async def test_claim_of_a_cancelled_caller_comes_back_with_its_lease(
    transport: Any, operation: str, wait: float | None, clock: Any
) -> None:
    store = InMemoryLightningStore(clock=clock)
    await store.enqueue_rollout({"n": 1})

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **QUICK) as client:
        await client.statistics()
        proxy.hold_replies()
        call = asyncio.create_task(getattr(client, operation)(worker_id="w", wait=wait, heartbeat_interval=10))
        await _until(store, queue_length=0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        proxy.release_replies()
        clock.advance(301)
        claim = await store.dequeue_rollout()

    assert claim is not None
    assert claim.attempt.sequence_id == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_claim_of_a_caller_cancelled_while_it_waits_takes_nothing(transport: Any) -> None:
    store = InMemoryLightningStore()

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **QUICK) as client:
        call = asyncio.create_task(client.dequeue_rollout("w", wait=30))
        while not store._board.has_waiters:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while store._board.has_waiters:
            await asyncio.sleep(0.01)
        await store.enqueue_rollout({"n": 1})

        assert (await store.statistics())["queue_length"] == 1


@pytest.mark.parametrize(("transport", "wait"), [("http", None), ("ws", 0.2)])
async def test_late_copy_of_a_request_that_found_nothing_takes_no_rollout(transport: Any, wait: float | None) -> None:
    store = InMemoryLightningStore()

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport, **QUICK) as client:
        await client.statistics()
        nothing = await client.dequeue_rollout("w", wait=wait)
        await store.enqueue_rollout({"n": 1})
        await proxy.send_again()
        await asyncio.sleep(0.3)
        claim = await client.dequeue_rollout("w", wait=5)

    assert nothing is None
    assert claim is not None


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_waiting_request_sent_again_is_answered_when_its_first_copy_has_claimed(
    backend: str, tmp_path: Path
) -> None:
    store = BACKENDS[backend](tmp_path)
    server = LightningStoreServer(store, "127.0.0.1", 0)
    await server.start()

    async with LightningStoreClient(server.endpoint) as client:
        copies = []
        for _ in range(2):
            waiting = client.dequeue_rollout("w", wait=20.0, claim_id="0:1")
            copies.append(asyncio.create_task(waiting))
            await asyncio.sleep(0.3)
        await store.enqueue_rollout({"n": 1})
        done, pending = await asyncio.wait(copies, timeout=3)
        for copy in pending:
            copy.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    await server.stop()
    await store.close()

    assert not pending
    assert len({copy.result().attempt.attempt_id for copy in done}) == 1


# ---------------------------------------------------------------------- subscriptions


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_subscription_behind_a_cursor_keeps_no_call_waiting(transport: Any) -> None:
    store = InMemoryLightningStore()

    async with network(store) as proxy, LightningStoreClient(proxy.url, transport=transport) as client:
        changes: Any = client.subscribe(["rollout"], after=0)
        began = time.monotonic()
        await client.enqueue_rollout({"n": 1})
        seconds = time.monotonic() - began
        await changes.aclose()

    assert seconds < 15


async def _until(store: LightningStore, **expected: int) -> None:
    """Look until the statistics are as expected."""
    deadline = time.monotonic() + 30
    while not expected.items() <= dict(await store.statistics()).items():
        assert time.monotonic() < deadline, f"{expected} did not come true: {await store.statistics()}"
        await asyncio.sleep(0.01)
