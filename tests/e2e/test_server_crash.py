"""A store server is killed under load, again and again; its clients ride it out and lose nothing.

Clients of every transport enqueue, claim, trace, publish and measure, and keep a record of each answer they got. The
server is killed with SIGKILL before, amid and after claims, and started again on the same file. At the end the file
must hold what the records say, once: neither less, nor a second copy from a request that was sent again.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.store import LightningStoreClient, SqliteLightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, PromptTemplate, RolloutConfig
from tests.e2e.server_process import ServerProcess, left_behind
from tests.e2e.workload import RUN_ID, make_span

CLAIMS_BEFORE_DEATH = (0, 1, 8, 40)
"""Of the lives of a server: it is killed when so many rollouts were claimed since its clients came back."""
PATIENT: dict[str, Any] = {
    "retry_delays": (0.05,) * 40,
    "health_retry_delays": (0.05,) * 40,
    "outage_seconds": 30.0,
    "request_timeout": 10.0,
}
TRANSPORTS = ("http", "ws", "auto")
TWICE = RolloutConfig(max_attempts=2, retry_condition=["failed"])


@dataclass
class Record:
    """What clients asked for, and every answer they got."""

    numbers: Any = field(default_factory=itertools.count)
    queued: dict[int, str] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)
    """Attempt id -> the worker that was given it."""
    attempts: dict[str, list[str]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    spans: list[str] = field(default_factory=list)
    sequence_ids: list[tuple[str, int]] = field(default_factory=list)
    templates: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def claim(self, claim: AttemptedRollout, worker_id: str) -> None:
        attempt_id = claim.attempt.attempt_id
        assert attempt_id not in self.claims, f"{attempt_id} went to {self.claims[attempt_id]} and to {worker_id}"
        self.claims[attempt_id] = worker_id
        self.attempts.setdefault(claim.rollout_id, []).append(attempt_id)


async def produce(store: LightningStoreClient, record: Record, leave: asyncio.Event) -> None:
    while not leave.is_set():
        one = next(record.numbers)
        rollout = await store.enqueue_rollout({"n": one}, config=TWICE)
        record.queued[one] = rollout.rollout_id
        several = [next(record.numbers) for _ in range(2)]
        requests = [EnqueueRolloutRequest(input={"n": n}, config=TWICE) for n in several]
        for n, rollout in zip(several, await store.enqueue_many_rollouts(requests), strict=True):
            record.queued[n] = rollout.rollout_id
        await asyncio.sleep(0.03)


async def publish(store: LightningStoreClient, record: Record, leave: asyncio.Event) -> None:
    while not leave.is_set():
        number = next(record.numbers)
        await store.add_resources({"prompt": PromptTemplate(template=f"v{number}", engine="f-string")})
        record.templates.append(f"v{number}")
        await store.add_metrics(RUN_ID, number, {"loss": 1.0})
        record.steps.append(number)
        await asyncio.sleep(0.03)


Dequeue = Callable[[LightningStoreClient, str, str], Any]


async def dequeue_at_once(store: LightningStoreClient, worker_id: str, claim_id: str) -> Sequence[AttemptedRollout]:
    claims = await store.claim_rollouts(worker_id=worker_id, claim_id=claim_id)
    if not claims:
        await asyncio.sleep(0.01)
    return [claim.rollout for claim in claims]


async def dequeue_waiting(store: LightningStoreClient, worker_id: str, claim_id: str) -> Sequence[AttemptedRollout]:
    return [c.rollout for c in await store.claim_rollouts(worker_id=worker_id, wait=0.3, claim_id=claim_id)]


async def dequeue_several(store: LightningStoreClient, worker_id: str, claim_id: str) -> Sequence[AttemptedRollout]:
    return await store.dequeue_many_rollouts(limit=3, worker_id=worker_id, wait=0.3, claim_id=claim_id)


async def consume(
    store: LightningStoreClient, record: Record, leave: asyncio.Event, worker_id: str, dequeue: Dequeue
) -> None:
    """Claim and finish; a claim is made under one id until there is an answer."""
    number = 0
    while True:
        try:
            claims = await dequeue(store, worker_id, f"0:{number}")
        except StoreUnavailable:
            await asyncio.sleep(0.01)
            continue
        number += 1
        for claim in claims:
            record.claim(claim, worker_id)
        for claim in claims:
            await fulfil(store, record, claim)
        if leave.is_set() and not claims:
            return


async def fulfil(store: LightningStoreClient, record: Record, claim: AttemptedRollout) -> None:
    rollout_id, attempt_id = claim.rollout_id, claim.attempt.attempt_id
    number = await store.get_next_span_sequence_id(rollout_id, attempt_id)
    record.sequence_ids.append((rollout_id, number))
    single = make_span(claim, number, "a")
    await store.add_span(single)
    record.spans.append(single.span_id)
    batch = [make_span(claim, number + n, name) for n, name in enumerate("bc", 1)]
    await store.add_many_spans(batch)
    record.spans += [span.span_id for span in batch]
    is_failure = claim.input["n"] % 5 == 0 and claim.attempt.sequence_id == 1
    await store.update_attempt(rollout_id, attempt_id, status="failed" if is_failure else "succeeded")
    record.ended[attempt_id] = "failed" if is_failure else "succeeded"


class Load:
    """Clients of every transport at work."""

    def __init__(self, url: str) -> None:
        self.record = Record()
        self.clients = [LightningStoreClient(url, transport=t, **PATIENT) for t in TRANSPORTS]  # type: ignore[arg-type]
        self._no_more, self._leave = asyncio.Event(), asyncio.Event()
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.clients[0].start_run("load", run_id=RUN_ID)
        for client, transport in zip(self.clients, TRANSPORTS, strict=True):
            self._producing.append(asyncio.create_task(produce(client, self.record, self._no_more)))
            self._producing.append(asyncio.create_task(publish(client, self.record, self._no_more)))
            for dequeue in (dequeue_at_once, dequeue_waiting, dequeue_several):
                worker_id = f"{transport}-{dequeue.__name__}"
                work = consume(client, self.record, self._leave, worker_id, dequeue)
                self._consuming.append(asyncio.create_task(work))

    def raise_failures(self) -> None:
        for task in (*self._producing, *self._consuming):
            if task.done():
                task.result()

    async def finish(self) -> None:
        """Enqueue no more, finish what there is, and leave."""
        self._no_more.set()
        await asyncio.gather(*self._producing)
        queued = list(self.record.queued.values())
        await self.clients[0].wait_for_rollouts(queued, timeout=20)
        self._leave.set()
        await asyncio.gather(*self._consuming)
        await self.close()

    async def close(self) -> None:
        for task in (*self._producing, *self._consuming):
            task.cancel()
        await asyncio.gather(*self._producing, *self._consuming, return_exceptions=True)
        for client in self.clients:
            await client.close()


async def check(path: Path, record: Record, *, is_complete: bool) -> None:
    """The file holds what was acknowledged, once; if all was finished, also nothing else."""
    async with SqliteLightningStore(path) as store:
        rollouts: Sequence[Any] = await store.query_rollouts()
        by_number = Counter(rollout.input["n"] for rollout in rollouts)
        attempts = {r.rollout_id: list(await store.query_attempts(r.rollout_id)) for r in rollouts}
        spans = [span for r in rollouts for span in await store.query_spans(r.rollout_id)]
        steps = Counter(point.step for point in await store.query_metrics(RUN_ID))
        prompts: Sequence[Any] = [update.resources["prompt"] for update in await store.query_resources()]
        statistics = await store.statistics()

    everything = {attempt.attempt_id: attempt for of_one in attempts.values() for attempt in of_one}
    templates = Counter(prompt.template for prompt in prompts)
    span_ids = Counter(span.span_id for span in spans)
    for counted in (by_number, steps, templates, span_ids):
        assert not [name for name, count in counted.items() if count > 1]
    assert set(record.queued.values()) <= {rollout.rollout_id for rollout in rollouts}
    assert set(record.steps) <= set(steps)
    assert set(record.templates) <= set(templates)
    assert set(record.spans) <= set(span_ids)
    assert len(set(record.sequence_ids)) == len(record.sequence_ids)
    assert {attempt_id: everything[attempt_id].worker_id for attempt_id in record.claims} == record.claims
    assert {attempt_id: everything[attempt_id].status for attempt_id in record.ended} == record.ended
    if is_complete:
        assert {rollout.status for rollout in rollouts} == {"succeeded"}
        told = {rollout_id: [attempt.attempt_id for attempt in of_one] for rollout_id, of_one in attempts.items()}
        assert told == record.attempts
        assert len(spans) == len(record.spans)
        assert statistics["queue_length"] == 0


@pytest.mark.slow
async def test_clients_ride_out_a_server_that_is_killed_again_and_again(tmp_path: Path) -> None:
    chance = random.Random(20260101)
    path = tmp_path / "s.db"

    with ServerProcess(path) as server:
        load = Load(server.url)
        await load.start()
        try:
            for claims in CLAIMS_BEFORE_DEATH:
                enough = len(load.record.claims) + claims
                while len(load.record.claims) < enough:  # clients tell nobody
                    load.raise_failures()
                    await asyncio.sleep(0.005)
                await asyncio.sleep(chance.uniform(0, 0.02))
                await asyncio.to_thread(server.kill)
                load.raise_failures()
                await asyncio.to_thread(server.start)
            await load.finish()
        finally:
            await load.close()
        code = await asyncio.to_thread(server.terminate)

    assert code == 0
    await check(path, load.record, is_complete=True)
    assert len(load.record.claims) > sum(CLAIMS_BEFORE_DEATH)
    assert left_behind() == []


@pytest.mark.slow
async def test_a_server_told_to_leave_under_load_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.db"

    with ServerProcess(path) as server:
        load = Load(server.url)
        await load.start()
        while len(load.record.claims) < 20:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        code = await asyncio.to_thread(server.terminate)
        seconds = time.monotonic() - began
        await asyncio.to_thread(server.start)
        await load.finish()
        second_code = await asyncio.to_thread(server.terminate)

    assert (code, second_code) == (0, 0)
    assert seconds < 20
    await check(path, load.record, is_complete=True)


async def test_blocked_dequeues_end_promptly_when_the_server_is_told_to_leave(tmp_path: Path) -> None:
    impatient: dict[str, Any] = {"retry_delays": (), "health_retry_delays": (), "outage_seconds": 0.0}

    with ServerProcess(tmp_path / "s.db") as server:
        clients = [LightningStoreClient(server.url, transport=t, **impatient) for t in TRANSPORTS]  # type: ignore[arg-type]
        async with aiohttp.ClientSession() as session:
            url = f"{server.url}/v1/agl/queues/rollouts/dequeue-one"
            raw = asyncio.create_task(_status(session, url, {"wait": 60}))
            blocked = [asyncio.create_task(client.dequeue_many_rollouts(wait=60)) for client in clients]
            await asyncio.sleep(1)
            began = time.monotonic()
            code = await asyncio.to_thread(server.terminate)
            results = await asyncio.gather(*blocked, return_exceptions=True)
            status = await raw
            seconds = time.monotonic() - began
        for client in clients:
            await client.close()

    assert code == 0
    assert status == 503
    assert [type(result) for result in results] == [StoreUnavailable] * len(TRANSPORTS)
    assert seconds < 20


async def _status(session: aiohttp.ClientSession, url: str, body: Any) -> int:
    async with session.post(url, json=body) as response:
        return response.status
