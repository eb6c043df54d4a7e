"""Whole trainings whose agents call through the LLM proxy that the trainer was given."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.algorithm.utils import with_llm_proxy, with_store
from tests.e2e.server_process import free_port, left_behind
from tests.llm_proxy.accounts import CALL, entry
from tests.stub_model.script import Script
from tests.stub_model.server import StubModel, running

TASKS = [f"question number {number:03d}" for number in range(6)]
KEY = "the-key-of-the-proxy"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


@pytest.fixture
def model() -> Iterator[StubModel]:
    with running(Script(lambda request: f"I heard: {request.text}")) as served:
        yield served


class Asking(agl.LitAgent[str]):
    """Asks the model that its resources name."""

    async def rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"].with_attempted_rollout(rollout)
        async with openai.AsyncOpenAI(api_key=llm.api_key or "x", base_url=llm.endpoint, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": task}]
            reply = await client.chat.completions.create(model=llm.model, messages=messages)
        return float(f"I heard: {task}" == reply.choices[0].message.content)


class Publishing(agl.Algorithm):
    """Publishes the proxy, has all tasks done, and keeps the model versions it saw."""

    @with_llm_proxy(required=True)
    @with_store
    async def run(self, store: Any, llm_proxy: Any, train_dataset: Any = None, val_dataset: Any = None) -> None:
        assert llm_proxy.is_running()
        await store.add_resources({"main_llm": llm_proxy.as_resource()})
        rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts], timeout=60)


def strategy(name: str) -> Any:
    if name == "shm":
        return agl.SharedMemoryExecutionStrategy(n_runners=2, main_thread="algorithm")
    return agl.ClientServerExecutionStrategy(n_runners=2, server_port=free_port())


def check(store: agl.LightningStore, model: StubModel) -> None:
    """Each task was done once, and its call is stored under its attempt."""
    asyncio.run(check_rollouts(store))
    assert sorted(request.text for request in model.requests) == TASKS


async def check_rollouts(store: agl.LightningStore) -> None:
    rollouts = await store.query_rollouts()
    assert sorted(str(rollout.input) for rollout in rollouts) == TASKS
    for rollout in rollouts:
        spans = list(await store.query_spans(rollout.rollout_id))
        (attempt,) = await store.query_attempts(rollout.rollout_id)
        (call,) = [span for span in spans if span.name == CALL]
        assert (rollout.status, agl.find_final_reward(spans)) == ("succeeded", 1.0)
        assert call.attempt_id == attempt.attempt_id
        assert call.attributes["gen_ai.prompt.0.content"] == rollout.input


@pytest.mark.parametrize(("name", "api_key"), [("shm", KEY), ("cs", None), ("cs", KEY)], ids=["shm", "open", "locked"])
def test_algorithm_publishes_the_proxy_and_agents_call_through_it(
    model: StubModel, name: str, api_key: str | None
) -> None:
    proxy = agl.LLMProxy(model_list=[entry(model)], api_key=api_key)
    trainer = agl.Trainer(algorithm=Publishing(), strategy=strategy(name), llm_proxy=proxy, progress="off")

    trainer.fit(Asking(), TASKS)

    assert not proxy.is_running()
    check(trainer.store, model)


def test_proxy_that_runs_already_is_used_and_left_running(model: StubModel, tmp_path: Path) -> None:
    store = agl.SqliteLightningStore(tmp_path / "store.db")
    proxy = agl.LLMProxy(0, [entry(model)], store)
    proxy.start()
    trainer = agl.Trainer(algorithm=Publishing(), strategy=strategy("cs"), llm_proxy=proxy, store=store, progress="off")

    trainer.fit(Asking(), TASKS)

    assert proxy.is_running()
    proxy.stop()
    check(store, model)
    asyncio.run(store.close())


def test_algorithm_without_the_proxy_that_it_needs_is_told() -> None:
    trainer = agl.Trainer(algorithm=Publishing(), strategy=strategy("shm"), progress="off")
    with pytest.raises(ValueError, match="needs an LLM proxy"):
        trainer.fit(Asking(), TASKS)
