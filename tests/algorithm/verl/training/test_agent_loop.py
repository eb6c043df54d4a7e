"""Our agent loop as verl calls it: what a batch becomes in the store, and what comes back into verl's queue."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

import agentlightning as agl
from agentlightning.algorithm.verl import compose
from agentlightning.errors import ConfigurationError
from agentlightning.store.client_server import LightningStoreServer
from tests.algorithm.verl.training.test_training import ask, config_in

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("default")]
UID = "prompt-1"


class Queue:
    """What is put into verl's TransferQueue, in its order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.statuses: list[tuple[str, str]] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self.is_settled = asyncio.Event()

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, tags: list[dict[str, Any]], fields: Any = None
    ) -> None:
        if fields is not None:
            assert self.statuses[-1][1] == "running", "the status of a group comes after its trajectories"
            self.rows |= {key: {"partition": partition_id, "fields": fields[n]} for n, key in enumerate(keys)}
            return
        self.statuses += [(key, tag["status"]) for key, tag in zip(keys, tags, strict=True)]
        if self.statuses[-1][1] in ("finished", "failure"):
            self._loop.call_soon_threadsafe(self.is_settled.set)


class Model:
    """verl's client: answers "red"."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        return SimpleNamespace(token_ids=[5, 1], log_probs=[-1.0, -1.0], stop_reason="completed", extra_fields={})


@pytest.fixture
async def server() -> AsyncIterator[LightningStoreServer]:
    server = LightningStoreServer(agl.InMemoryLightningStore(), port=0)
    await server.start()
    yield server
    await server.stop()


async def settled(
    server: LightningStoreServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    agent: Callable[..., Any] | None,
    is_validation: bool = False,
    afterwards: Callable[[], Any] | None = None,
    **options: Any,
) -> Queue:
    """The queue after one prompt; without an agent nobody runs its rollouts.

    Args:
        afterwards: Called while the proxy still runs.
    """
    import transfer_queue
    from verl.utils import tensordict_utils as tu

    from agentlightning.algorithm.verl.agent_loop import StoreAgentLoopManager

    queue = Queue()
    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", queue.async_kv_batch_put)
    config = compose(config_in(folder, store_url=server.endpoint, **options))
    config["actor_rollout_ref"]["rollout"]["val_kwargs"]["n"] = 2
    manager = await asyncio.to_thread(StoreAgentLoopManager.create, config, Model())
    columns = {"uid": UID, "task": {"input": "t"}, "data_source": "d", "reward_model": {}}
    batch = tu.get_tensordict({name: np.array([value], dtype=object) for name, value in columns.items()})
    tu.assign_non_tensor_data(batch, "global_steps", 4)
    if is_validation:
        tu.assign_non_tensor(batch, validate=True)
    runner = agl.LitAgentRunner(agl.OtelTracer())
    stop = asyncio.Event()
    try:
        manager.generate_sequences(batch)
        if agent is not None:
            with runner.run_context(agent=agl.rollout(agent), store=server):
                running = asyncio.create_task(runner.iter(event=stop))
                await asyncio.wait_for(queue.is_settled.wait(), 60)
                stop.set()
                await running
        await asyncio.wait_for(queue.is_settled.wait(), 60)
        if afterwards is not None:
            await asyncio.to_thread(afterwards)
    finally:
        await asyncio.to_thread(manager.close)
    return queue


async def test_a_rollout_that_nobody_runs_is_cancelled_and_the_group_fails(
    server: LightningStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await settled(server, tmp_path, monkeypatch, agent=None, wait_timeout_seconds=0.2)

    assert queue.statuses == [(UID, "running"), (UID, "failure")]
    assert queue.rows == {}
    rollouts = await server.query_rollouts()
    assert [rollout.status for rollout in rollouts] == ["cancelled"] * 3
    assert {(rollout.metadata or {})["data_id"] for rollout in rollouts} == {UID}


async def test_a_conversation_is_one_trajectory_under_the_key_of_its_session(
    server: LightningStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(task: str, llm: agl.LLM) -> float:
        await asyncio.to_thread(ask, llm, "green", "white")
        return 0.5

    level = {"level": "trajectory"}
    queue = await settled(server, tmp_path, monkeypatch, agent=agent, trace_aggregator=level)

    assert queue.statuses == [(UID, "running"), (UID, "finished")]
    assert sorted(queue.rows) == [f"{UID}_{session}_0" for session in range(3)]
    fields = queue.rows[f"{UID}_0_0"]["fields"]
    assert fields["response_mask"].tolist()[:2] == [1, 1]
    assert 0 in fields["response_mask"].tolist()
    assert fields["rm_scores"].tolist()[-1] == 0.5


async def test_a_call_of_an_attempt_that_is_over_is_refused(
    server: LightningStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[agl.LLM] = []

    async def agent(task: str, llm: agl.LLM) -> float:
        given.append(llm)
        await asyncio.to_thread(ask, llm, "green")
        return 1.0

    def call_late() -> None:
        with pytest.raises((openai.AuthenticationError, openai.PermissionDeniedError), match="over"):
            ask(given[0], "green")

    queue = await settled(server, tmp_path, monkeypatch, agent=agent, afterwards=call_late)

    assert queue.statuses[-1] == (UID, "finished")


@pytest.mark.parametrize(
    ("failed", "is_validation", "rewards"),
    [("skip", False, [1.0]), ("worst", False, [0.0, 1.0]), ("skip", True, [0.0, 1.0])],
    ids=["left out", "counted", "validation"],
)
async def test_what_a_failed_rollout_counts(
    server: LightningStoreServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failed: str,
    is_validation: bool,
    rewards: list[float],
) -> None:
    numbers = itertools.count()

    async def agent(task: str, llm: agl.LLM) -> float:
        if next(numbers) > 0:
            if not is_validation:
                await asyncio.to_thread(ask, llm, "green")
            raise RuntimeError("crashed")
        await asyncio.to_thread(ask, llm, "green")
        return 1.0

    queue = await settled(server, tmp_path, monkeypatch, agent=agent, is_validation=is_validation, failed=failed)

    found = {row["fields"]["rm_scores"].tolist()[-1] for row in queue.rows.values()}
    assert sorted(found) == rewards
    assert {row["partition"] for row in queue.rows.values()} == {"val" if is_validation else "train"}
    assert queue.statuses[-1][1] == ("finished" if failed == "worst" else "failure")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"reward": {"reward_model": {"enable": True}}}, "reward_model.enable"), ({}, "agentlightning.store_url")],
    ids=["reward model", "no store"],
)
def test_what_the_loop_cannot_do_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    from agentlightning.algorithm.verl.agent_loop import StoreAgentLoopManager

    with pytest.raises(ConfigurationError, match=words):
        StoreAgentLoopManager.create(compose({**config_in(tmp_path), **change}), Model())
