"""SFT over the whole stack: agents try tasks through the proxy, the best tries are learned and served."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.algorithm.sft import SFT, FittingSettings
from tests.algorithm.sft.recording import record
from tests.e2e.server_process import left_behind

TASKS = ["add 11+22", "sum 31+14", "count 52", "name 23"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


class Asking(agl.LitAgent[str]):
    """Asks the model, and likes short answers."""

    async def rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"].with_attempted_rollout(rollout)
        async with openai.AsyncOpenAI(api_key=llm.api_key or "x", base_url=llm.endpoint, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": task}]
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, temperature=llm.sampling_parameters["temperature"], max_tokens=24
            )
        return -float(len(reply.choices[0].message.content or ""))


async def rewards_by_task(store: agl.LightningStore) -> dict[str, list[float]]:
    """Of the tries that were made for training."""
    found: dict[str, list[float]] = {}
    for rollout in await store.query_rollouts():
        if rollout.mode == "train":
            reward = agl.find_final_reward(list(await store.query_spans(rollout.rollout_id)))
            assert reward is not None
            found.setdefault(str(rollout.input), []).append(reward)
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_best_of_several_tries_is_learned_and_agents_get_what_was_learned(tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    algorithm = SFT(
        best_of=4,
        temperature=1.2,
        fitting=FittingSettings(epochs=60, batch_size=4),
        learning=LearnerSettings(learning_rate=5e-3, threads=1),
        held_out=0.0,
        checkpoints=tmp_path,
    )
    strategy = agl.SharedMemoryExecutionStrategy(n_runners=2, main_thread="algorithm")
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy=strategy, tracer=agl.OtelTracer())

    trainer.fit(Asking(), TASKS, val_dataset=TASKS)

    tries = asyncio.run(rewards_by_task(store))
    assert {task: len(rewards) for task, rewards in tries.items()} == dict.fromkeys(TASKS, 4)
    assert algorithm.examples is not None
    assert len(algorithm.examples.rollout_ids) == len(TASKS)
    assert algorithm.result is not None
    assert algorithm.result.mean == sum(max(rewards) for rewards in tries.values()) / len(TASKS)
    assert sorted(path.name for path in (tmp_path / "tiny").glob("step-*"))[-1] == "step-000060"


@pytest.mark.slow
async def test_the_trained_model_is_served_until_it_is_closed() -> None:
    store = agl.InMemoryLightningStore()
    await record(store, "sky", "blue")
    algorithm = SFT(
        publish=True,
        fitting=FittingSettings(epochs=40),
        learning=LearnerSettings(learning_rate=5e-3, threads=1),
        held_out=0.0,
    )
    algorithm.set_store(store)

    await algorithm.run()
    try:
        latest = await store.get_latest_resources()
        assert latest is not None
        assert latest.resources_id == algorithm.resources_id
        llm: Any = latest.resources["main_llm"]
        async with openai.AsyncOpenAI(api_key=llm.api_key or "x", base_url=llm.endpoint, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "sky"}]
            reply = await client.chat.completions.create(model=llm.model, messages=messages, temperature=0)
    finally:
        await algorithm.close()

    assert reply.choices[0].message.content == "blue"
