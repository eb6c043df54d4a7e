"""Runners with other stores: those of the 0.2 release, and one behind a server that goes away and comes back."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentlightning.execution import ThreadingEvent
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreThreaded
from agentlightning.store.base import UNSET
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.types import Attempt, AttemptedRollout, Rollout
from tests.e2e.server_process import ServerProcess
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering, until, work_off


class OldStore(LightningStore):
    """A store written for the 0.2 release: fewer operations, with fewer arguments."""

    def __init__(self) -> None:
        self._inner = InMemoryLightningStore()
        self.refuses_claims = 0

    async def start_rollout(
        self, input: Any, mode: Any = None, resources_id: str | None = None, config: Any = None, metadata: Any = None
    ) -> AttemptedRollout:
        return await self._inner.start_rollout(input, mode, resources_id, config, metadata)

    async def enqueue_rollout(
        self, input: Any, mode: Any = None, resources_id: str | None = None, config: Any = None, metadata: Any = None
    ) -> Rollout:
        return await self._inner.enqueue_rollout(input, mode, resources_id, config, metadata)

    async def dequeue_rollout(self) -> AttemptedRollout | None:  # type: ignore[override] # as in 0.2
        return await self._inner.dequeue_rollout()

    async def update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> Attempt:  # type: ignore[override] # as in 0.2
        if "worker_id" in changes and self.refuses_claims > 0:
            self.refuses_claims -= 1
            raise ValueError("not yours")
        return await self._inner.update_attempt(rollout_id, attempt_id, **changes)

    async def get_rollout_by_id(self, rollout_id: str) -> Any:
        return await self._inner.get_rollout_by_id(rollout_id)

    async def query_rollouts(self, *, status: Any = None, rollout_ids: Any = None) -> Any:  # type: ignore[override] # as in 0.2
        return list(await self._inner.query_rollouts(status=status, rollout_ids=rollout_ids))

    async def query_attempts(self, rollout_id: str) -> Any:  # type: ignore[override] # as in 0.2
        return list(await self._inner.query_attempts(rollout_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._inner.get_latest_attempt(rollout_id)

    async def add_span(self, span: Any) -> Any:
        return await self._inner.add_span(span)

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Any:
        return await self._inner.add_otel_span(rollout_id, attempt_id, readable_span, sequence_id)

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._inner.get_next_span_sequence_id(rollout_id, attempt_id)

    async def query_spans(self, rollout_id: str, attempt_id: Any = None) -> Any:  # type: ignore[override] # as in 0.2
        return list(await self._inner.query_spans(rollout_id, attempt_id))

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> Any:  # type: ignore[override] # as in 0.2
        return await self._inner.wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)

    async def add_resources(self, resources: Any) -> Any:
        return await self._inner.add_resources(resources)

    async def update_resources(self, resources_id: str, resources: Any) -> Any:  # type: ignore[override] # as in 0.2
        return await self._inner.update_resources(resources_id, resources)

    async def get_resources_by_id(self, resources_id: str) -> Any:
        return await self._inner.get_resources_by_id(resources_id)

    async def get_latest_resources(self) -> Any:
        return await self._inner.get_latest_resources()


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("is_shared", [False, True], ids=["bare", "threaded"])
@pytest.mark.parametrize("tracer", [OtelTracer, DummyTracer], ids=lambda t: t.__name__)
async def test_a_store_of_the_0_2_release_will_do(tracer: Any, is_shared: bool, concurrency: int) -> None:
    old = OldStore()
    await old.add_resources(RESOURCES)
    store: LightningStore = LightningStoreThreaded(old) if is_shared else old

    worked = await work_off(
        Answering(lambda task: float(task)), *range(6), store=store, tracer=tracer(), max_concurrency=concurrency
    )

    assert set(await worked.statuses()) == {"succeeded"}
    assert [await worked.rewards(number) for number in range(6)] == [[float(number)] for number in range(6)]
    assert ((await worked.attempt()).worker_id or "").startswith("Worker-0@")


async def test_a_claim_that_an_old_store_refuses_is_skipped_and_not_counted() -> None:
    old = OldStore()
    await old.add_resources(RESOURCES)
    old.refuses_claims = 1

    worked = await work_off(Answering(lambda _: 1.0), "refused", "taken", store=old, max_rollouts=1)

    assert await worked.statuses() == ["preparing", "succeeded"]


@pytest.mark.parametrize("tracer", [OtelTracer, DummyTracer], ids=lambda t: t.__name__)
async def test_a_store_of_the_0_2_release_keeps_the_output_with_the_attempt(tracer: Any) -> None:
    old = OldStore()
    await old.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda _: "text"), store=old, tracer=tracer())

    assert await worked.statuses() == ["succeeded"]
    assert (await worked.attempt()).metadata == {"output": "text"}


class WithoutOutputs(InMemoryLightningStore):
    """A store whose author knows how an attempt is finished, and nothing of outputs."""

    async def finish_attempt(  # type: ignore[override] # as before there were outputs
        self, rollout_id: str, attempt_id: str, status: Any, *, spans: Any = (), metadata: Any = UNSET
    ) -> Attempt:
        return await super().finish_attempt(rollout_id, attempt_id, status, spans=spans, metadata=metadata)


async def test_a_store_that_finishes_without_outputs_keeps_them_with_the_attempt() -> None:
    store = WithoutOutputs()
    await store.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda _: "text"), store=store)

    assert await worked.statuses() == ["succeeded"]
    assert (await worked.attempt()).metadata == {"output": "text"}


class OldServer(InMemoryLightningStore):
    """What a client sees of a server of an earlier release: no route to finish an attempt in one step."""

    async def finish_attempt(self, *args: Any, **options: Any) -> Attempt:
        raise NotImplementedError

    async def finish_and_claim(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("tracer", [OtelTracer, DummyTracer], ids=lambda t: t.__name__)
async def test_a_server_that_cannot_finish_in_one_step_keeps_outputs_with_the_attempts(tracer: Any) -> None:
    store = OldServer()
    await store.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda task: f"text {task}"), *range(2), store=store, tracer=tracer())

    assert await worked.statuses() == ["succeeded", "succeeded"]
    assert [((await worked.attempt(n)).metadata or {})["output"] for n in range(2)] == ["text 0", "text 1"]


async def test_a_step_runs_with_a_store_of_the_0_2_release() -> None:
    old = OldStore()
    runner: LitAgentRunner[Any] = LitAgentRunner(DummyTracer(), heartbeat_interval=0)

    with runner.run_context(agent=Answering(lambda _: 1.0), store=old):
        rollout = await runner.step("task", resources=RESOURCES)

    assert rollout.status == "succeeded"


async def test_heartbeats_into_a_store_of_the_0_2_release_harm_nobody() -> None:
    old = OldStore()
    await old.add_resources(RESOURCES)

    worked = await work_off(
        Answering(lambda _: 1.0), store=old, heartbeat_interval=0.01, heartbeat_launch_mode="asyncio"
    )

    assert await worked.statuses() == ["succeeded"]


class ByTask(LitAgent[Any]):
    """Notes what it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.done.append(task)
        return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_server_that_is_restarted_meanwhile_loses_nothing(tmp_path: Path, concurrency: int) -> None:
    agent, event = ByTask(), ThreadingEvent()
    runner: LitAgentRunner[Any] = LitAgentRunner(
        OtelTracer(), poll_interval=1.0, heartbeat_interval=0, max_concurrency=concurrency
    )

    with ServerProcess(tmp_path / "store.db") as server:
        client = LightningStoreClient(server.url)
        with runner.run_context(agent=agent, store=client):
            await client.add_resources(RESOURCES)
            work = asyncio.create_task(runner.iter(event=event))
            first = [await client.enqueue_rollout(number) for number in range(10)]
            await until(lambda: len(agent.done) >= 3)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            second = [await client.enqueue_rollout(number) for number in range(10, 20)]
            ids = [rollout.rollout_id for rollout in (*first, *second)]
            done = await client.wait_for_rollouts(rollout_ids=ids, timeout=60)
            event.set()
            await asyncio.wait_for(work, PATIENCE_SECONDS)
        rewards = [len(await client.query_spans(rollout_id)) for rollout_id in ids]
        await client.close()

    assert [rollout.status for rollout in done] == ["succeeded"] * 20
    assert rewards == [1] * 20
    assert sorted(agent.done) == list(range(20))
