"""The models that a run served are gone when it has ended, however it did: no later agent is sent to them."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("torch", reason="GRPO needs torch")

import agentlightning as agl  # after the check for torch
from agentlightning.errors import TrainingError
from tests import warm_python
from tests.algorithm.grpo.training import Asking, every_second, grpo, trainer
from tests.e2e.server_process import free_port
from tests.stub_model.script import Script
from tests.stub_model.server import running
from tests.trainer.trainings import a_trainer

PROMPT = agl.PromptTemplate(template="Do it.", engine="f-string")
OWN = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="own")
TASKS = ["say 40", "say 41"]
SCRIPT_SECONDS = 100.0
KILLED = """
import os, signal, sys
import agentlightning as agl

@agl.rollout
def dying(task, llm: agl.LLM):
    os.kill(os.getpid(), signal.SIGKILL)

trainer = agl.Trainer(
    store=sys.argv[1],
    algorithm=agl.GRPO("tiny", group_size=2, tasks_per_step=1, steps=1),
    strategy=agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm"),
    initial_resources={"prompt": agl.PromptTemplate(template="Do it.", engine="f-string")},
)
trainer.fit(dying, ["say 40"])
"""


@pytest.fixture
def original() -> Iterator[Any]:
    with running(models=("gpt-4.1-nano",), script=Script(lambda request: "its own model")) as served:
        yield served


def dev(store: Any, url: str) -> tuple[list[Any], list[Any]]:
    """What an agent with a model of its own is given, and what it hears from its model."""
    seen, heard = list[Any](), list[Any]()

    @agl.rollout
    def agent(task: str, resources: agl.NamedResources) -> float:
        if task != "one":  # a task of the training, still in the queue
            return 0.0
        seen.append(resources)
        client = openai.OpenAI(api_key="x", base_url=url, max_retries=0)
        messages: Any = [{"role": "user", "content": task}]
        heard.append(client.chat.completions.create(model="gpt-4.1-nano", messages=messages).choices[0].message.content)
        return 1.0

    a_trainer(store=store, initial_resources=None, algorithm=None, tracer=agl.OtelTracer()).dev(agent, ["one"])
    return seen, heard


def end(how: str, store: Any) -> None:
    """Train for a step; the training ends as it is told to."""

    def judge(agent: Asking, task: Any, rollout: Any, said: str) -> float:
        if how == "stopped":
            made.stop()
        if how == "failed":
            raise ValueError("nothing works")
        return every_second(agent, task, rollout, said)

    made = trainer(grpo(steps=1000 if how == "stopped" else 1), store=store, initial_resources={"prompt": PROMPT})
    with pytest.raises(TrainingError) if how == "failed" else contextlib.nullcontext():
        made.fit(Asking(judge), TASKS)


@pytest.mark.parametrize("how", ["succeeded", "failed", "stopped"])
def test_agent_with_a_model_of_its_own_keeps_it_after_a_training(engine: Any, original: Any, how: str) -> None:
    store = agl.InMemoryLightningStore()

    end(how, store)

    assert [run.status for run in asyncio.run(store.query_runs())] == [how]
    assert dev(store, original.url) == ([{"prompt": PROMPT}], ["its own model"])


def test_agent_with_a_model_of_its_own_keeps_it_after_a_training_was_killed(tmp_path: Path, original: Any) -> None:
    address = f"sqlite:///{tmp_path / 'runs.db'}"

    command = [sys.executable, "-c", KILLED, address]
    killed = warm_python.run(command, timeout=SCRIPT_SECONDS, kind=warm_python.TorchPopen)

    assert killed.returncode == -9
    assert dev(address, original.url) == ([{"prompt": PROMPT}], ["its own model"])


def test_model_that_the_user_gave_comes_back_when_the_trained_one_ends(engine: Any) -> None:
    store, given = agl.InMemoryLightningStore(), {"prompt": PROMPT, "main_llm": OWN}

    trainer(grpo(steps=1), store=store, initial_resources=given).fit(Asking(every_second), TASKS)

    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None
    assert latest.resources == given


@pytest.mark.parametrize("is_running", [True, False], ids=["outlives the run", "ends with the run"])
def test_proxy_among_the_initial_resources_stays_only_if_it_runs_on(original: Any, is_running: bool) -> None:
    store, model = agl.InMemoryLightningStore(), {"model": "openai/gpt-4.1-nano", "api_base": original.url}
    proxy = agl.LLMProxy(free_port(), [{"model_name": "m", "litellm_params": model}], store)
    if is_running:
        proxy.start()
    given: Any = {"prompt": PROMPT, "main_llm": proxy.as_resource()}

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        client = openai.OpenAI(api_key="x", base_url=llm.endpoint, max_retries=0)
        messages: Any = [{"role": "user", "content": task}]
        answer = client.chat.completions.create(model=llm.model, messages=messages)
        return float(answer.choices[0].message.content == "its own model")

    a_trainer(store=store, initial_resources=given, llm_proxy=proxy).dev(agent, ["one"])

    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None
    assert [rollout.status for rollout in asyncio.run(store.query_rollouts())] == ["succeeded"]
    assert latest.resources == (given if is_running else {"prompt": PROMPT})
    assert proxy.is_running() == is_running
    proxy.stop()
