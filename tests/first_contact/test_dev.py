"""An agent that asks for no resource needs none; one that asks is told what is missing."""

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import TrainingError


def rewards_of(store: agl.LightningStore) -> list[float | None]:
    """Rewards in the order in which the rollouts were sent."""

    async def read() -> list[float | None]:
        rollouts = await store.query_rollouts()
        return [agl.find_final_reward(await store.query_spans(rollout.rollout_id)) for rollout in rollouts]

    return asyncio.run(read())


@pytest.mark.parametrize("decorate", [lambda function: function, agl.rollout], ids=["plain", "decorated"])
def test_a_function_that_takes_its_task_alone_needs_no_resource(decorate: Any) -> None:
    def agent(task: float) -> float:
        return task / 2

    trainer = agl.Trainer()
    trainer.dev(decorate(agent), [1.0, 2.0])

    assert rewards_of(trainer.store) == [0.5, 1.0]


def test_a_class_that_leaves_its_resources_alone_needs_none() -> None:
    seen: list[Any] = []

    class MyAgent(agl.LitAgent[int]):
        def rollout(self, task: int, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
            seen.append(resources)
            return float(task)

    trainer = agl.Trainer()
    trainer.dev(MyAgent(), [1, 2])

    assert rewards_of(trainer.store) == [1.0, 2.0]
    assert seen == [{}, {}]


@pytest.mark.parametrize(("parameter", "kind"), [("llm", "LLM"), ("prompt_template", "PromptTemplate")])
def test_an_agent_that_asks_for_a_resource_is_told_what_is_missing(parameter: str, kind: str) -> None:
    agents = {"llm": lambda task, llm: 1.0, "prompt_template": lambda task, prompt_template: 1.0}

    with pytest.raises(TrainingError, match=f"asks for {parameter}.*{kind}.*initial_resources.*add_resources"):
        agl.Trainer(progress="off").dev(agents[parameter], [1])
