"""Many clients at once, each with connections of its own: no rollout is lost, none is worked on twice."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from agentlightning.store import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest
from tests.e2e.server_process import ServerProcess, left_behind
from tests.e2e.workload import make_span

CLIENTS = 200
ROLLOUTS = 400
MOST_SECONDS = 60.0
SPARE_DESCRIPTORS = 10
"""What a server may hold after its clients have left: connections of readers, and those not closed yet."""


async def work(client: LightningStoreClient, worker_id: str, done: "Counter[str]") -> None:
    """Claim and finish until all is done."""
    while done.total() < ROLLOUTS:
        claim = await client.dequeue_rollout(worker_id, wait=1.0)
        if claim is None:
            continue
        await client.add_span(make_span(claim, 1, "step"))
        await client.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
        done[claim.rollout_id] += 1


async def run_load(url: str) -> "Counter[str]":
    """Returns how often each rollout was finished."""
    done: Counter[str] = Counter()
    clients = [LightningStoreClient(url) for _ in range(CLIENTS)]
    working = [asyncio.create_task(work(client, f"w-{n}", done)) for n, client in enumerate(clients)]
    try:
        await clients[0].enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": n}) for n in range(ROLLOUTS)])
        await asyncio.gather(*working)
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        for client in clients:
            await client.close()
    return done


@pytest.mark.slow
async def test_two_hundred_clients_finish_every_rollout_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "s.db") as server:
        async with LightningStoreClient(server.url) as watcher:
            await watcher.statistics()
            before = server.descriptors
            began = time.monotonic()
            done = await run_load(server.url)
            seconds = time.monotonic() - began
            rollouts = await watcher.query_rollouts()
            statistics = await watcher.statistics()
            await _until_descriptors_are_back(server, before)
        code = await asyncio.to_thread(server.terminate)

    assert (len(done), set(done.values())) == (ROLLOUTS, {1})
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    assert {rollout.attempt.sequence_id for rollout in rollouts} == {1}  # type: ignore[union-attr]
    assert (statistics["total_rollouts"], statistics["total_attempts"]) == (ROLLOUTS, ROLLOUTS)
    assert (statistics["total_spans"], statistics["queue_length"]) == (ROLLOUTS, 0)
    assert seconds < MOST_SECONDS
    assert code == 0
    assert left_behind() == []


async def _until_descriptors_are_back(server: ServerProcess, before: int) -> None:
    deadline = time.monotonic() + 5
    while server.descriptors > before + SPARE_DESCRIPTORS:
        assert time.monotonic() < deadline, f"the server holds {server.descriptors} descriptors, {before} before"
        await asyncio.sleep(0.05)
