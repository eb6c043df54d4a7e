"""Runners with other stores: those of the 0.2 release, and one behind a server that goes away and comes back."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentlightning.execution import ThreadingEvent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreThreaded
from agentlightning.store.base import UNSET
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.types import Attempt
from tests.e2e.server_process import ServerProcess
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering, until, work_off
from tests.store.test_composed import OldStore


@pytest.mark.parametrize(
    ("tracer", "is_shared", "concurrency"),
    [(OtelTracer, True, 4), (DummyTracer, False, 1)],
    ids=["otel-threaded-4", "dummy"],
)
async def test_a_store_of_the_0_2_release_will_do(tracer: Any, is_shared: bool, concurrency: int) -> None:
    old = OldStore()
    await old.add_resources(RESOURCES)
    store: LightningStore = LightningStoreThreaded(old) if is_shared else old

    agent = Answering(lambda task: float(task) if task < 6 else "text")
    worked = await work_off(agent, *range(7), store=store, tracer=tracer(), max_concurrency=concurrency)

    assert set(await worked.statuses()) == {"succeeded"}
    assert [await worked.rewards(number) for number in range(6)] == [[float(number)] for number in range(6)]
    assert (await worked.attempt(6)).metadata == {"output": "text"}
    assert ((await worked.attempt()).worker_id or "").startswith("Worker-0@")


class WithoutOutputs(InMemoryLightningStore):
    """A store whose author knows how an attempt is finished, and nothing of outputs."""

    async def finish_attempt(  # type: ignore[override] # as before there were outputs
        self, rollout_id: str, attempt_id: str, status: Any, *, spans: Any = (), metadata: Any = UNSET
    ) -> Attempt:
        return await super().finish_attempt(rollout_id, attempt_id, status, spans=spans, metadata=metadata)


async def test_a_store_that_finishes_without_outputs_keeps_them_all_the_same() -> None:
    store = WithoutOutputs()
    await store.add_resources(RESOURCES)

    worked = await work_off(Answering(lambda _: "text"), store=store)

    assert await worked.statuses() == ["succeeded"]
    assert [rollout.output for rollout in await store.query_rollouts()] == ["text"]


async def test_a_step_runs_with_a_store_of_the_0_2_release() -> None:
    old = OldStore()
    runner: LitAgentRunner[Any] = LitAgentRunner(DummyTracer(), heartbeat_interval=0)

    with runner.run_context(agent=Answering(lambda _: 1.0), store=old):
        rollout = await runner.step("task", resources=RESOURCES)

    assert rollout.status == "succeeded"


@pytest.mark.slow
async def test_a_server_that_is_restarted_meanwhile_loses_nothing(tmp_path: Path) -> None:
    done_tasks: list[Any] = []
    agent, event = Answering(lambda task: done_tasks.append(task) or 1.0), ThreadingEvent()  # type: ignore[func-returns-value]
    options: dict[str, Any] = {"poll_interval": 1.0, "heartbeat_interval": 0, "max_concurrency": 4}
    runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), **options)

    with ServerProcess(tmp_path / "store.db") as server:
        client = LightningStoreClient(server.url)
        with runner.run_context(agent=agent, store=client):
            await client.add_resources(RESOURCES)
            work = asyncio.create_task(runner.iter(event=event))
            first = [await client.enqueue_rollout(number) for number in range(10)]
            await until(lambda: len(done_tasks) >= 3)
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
    assert sorted(done_tasks) == list(range(20))
