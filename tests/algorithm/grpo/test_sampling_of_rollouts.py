"""How answers are sampled for training does not depend on what agents ask for."""

import asyncio
import logging
from typing import Any, Literal

import openai
import pytest

pytest.importorskip("torch", reason="GRPO needs torch")

import agentlightning as agl  # after the check for torch
from agentlightning.semconv import CALL_SPAN
from tests.algorithm.grpo.training import Asking, ask, every_second, grpo, trainer

pytestmark = pytest.mark.usefixtures("engine")

QUESTION = "20+51?"
WISHES: dict[str, Any] = {"seed": 42, "top_p": 0.01, "temperature": 0.1}
GROUP_SIZE = 8
SETTING = "gen_ai.request."


class Wishing(Asking):
    """Asks for the same answer each time, with a client of its own or with plain HTTP."""

    def __init__(self, way: str) -> None:
        super().__init__(every_second)
        self.way = way
        self.said: dict[str, list[str]] = {"train": [], "val": []}

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        self.seen[f"{rollout.mode}/{task}"] += 1
        if self.way == "sdk":
            async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
                messages: Any = [{"role": "user", "content": task}]
                made = await client.chat.completions.create(
                    model="any", messages=messages, max_tokens=6, **WISHES, extra_body={"top_k": 1}
                )
            said = str(made.choices[0].message)
        else:
            by_name: dict[str, Any] = {"agent": "solver", "model": "any"} if self.way == "named agent" else {}
            said = await ask(resources["main_llm"], rollout, task, **WISHES, top_k=1, **by_name)
        self.said[rollout.mode].append(said)
        return self.judge(self, task, rollout, said)


async def settings(made: agl.Trainer, mode: Literal["train", "val"]) -> list[dict[str, Any]]:
    """The settings of the requests that went to the engine."""
    spans = [
        span
        for rollout in await made.store.query_rollouts(mode_in=[mode])
        for span in await made.store.query_spans(rollout.rollout_id)
    ]
    return [
        {name.removeprefix(SETTING): value for name, value in span.attributes.items() if name.startswith(SETTING)}
        for span in spans
        if span.name == CALL_SPAN
    ]


@pytest.mark.parametrize("way", ["sdk", "named agent"])
def test_rollouts_of_a_group_differ_whatever_sampling_the_agent_asks_for(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Wishing(way)
    made = trainer(grpo(group_size=GROUP_SIZE, tasks_per_step=1, steps=1), concurrency=2)

    with caplog.at_level(logging.WARNING, logger="agentlightning.llm_proxy"):
        made.fit(agent, [QUESTION], [QUESTION])

    asked = asyncio.run(settings(made, "train"))
    assert len(asked) == GROUP_SIZE
    assert all(body["temperature"] == 1.0 and not {"seed", "top_p", "top_k"} & set(body) for body in asked)
    assert len(set(agent.said["train"])) > 1
    assert caplog.text.count("ask for seed=42") == 1


def test_validation_is_sampled_as_the_agent_asks_but_for_the_temperature() -> None:
    made = trainer(grpo(steps=1, validation_temperature=0.5), concurrency=1)

    made.fit(Wishing("plain"), [QUESTION], [QUESTION])

    asked = asyncio.run(settings(made, "val"))
    of_agent = [body for body in asked if "seed" in body]  # the others are sampled as in training
    assert [(body["seed"], body["top_p"], body["top_k"], body["temperature"]) for body in of_agent] == [
        (42, 0.01, 1, 0.5)
    ] * 2
    assert [body["temperature"] for body in asked if body not in of_agent] == [1.0, 1.0]
