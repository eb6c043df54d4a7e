"""`Trainer.dev`: what agents run with under which algorithm, and what the table says."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentlightning.algorithm import Algorithm, FastAlgorithm
from agentlightning.emitter import emit_annotation
from agentlightning.errors import ConfigurationError
from agentlightning.litagent import LitAgent, rollout
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import NamedResources, PromptTemplate, ProxyLLM, Rollout
from tests.runner.working import RESOURCES
from tests.trainer.trainings import Halving, a_trainer, rewards_of, runs_of

pytestmark = pytest.mark.usefixtures("nothing_is_left")

OFFERED = PromptTemplate(template="offered", engine="f-string")


class Looking(LitAgent[Any]):
    """Keeps the resources that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[NamedResources] = []

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
        self.seen.append(resources)
        return 1.0


class Plain(Algorithm):
    def dev_resources(self) -> Any:
        return {**(self.get_initial_resources() or {}), "offered": OFFERED}


class Async(Algorithm):
    async def dev_resources(self) -> Any:
        return {**(self.get_initial_resources() or {}), "offered": OFFERED}


class Managed(Algorithm):
    @asynccontextmanager
    async def dev_resources(self) -> AsyncIterator[Any]:
        yield {**(self.get_initial_resources() or {}), "offered": OFFERED}


@pytest.mark.parametrize("kind", [Plain, Async, Managed])
def test_an_algorithm_offers_what_agents_run_with(kind: type[Algorithm]) -> None:
    agent = Looking()

    a_trainer(algorithm=kind()).dev(agent, [1], [2])

    assert agent.seen == [{**RESOURCES, "offered": OFFERED}] * 2


@pytest.mark.parametrize(("offer", "seen"), [(None, {"latest": OFFERED}), ({}, {})], ids=["none", "empty"])
def test_no_offer_leaves_the_latest_resources_of_the_store_and_an_empty_one_does_not(offer: Any, seen: Any) -> None:
    class Offering(Algorithm):
        def dev_resources(self) -> Any:
            return offer

    store, agent = InMemoryLightningStore(), Looking()
    asyncio.run(store.add_resources({"latest": OFFERED}))

    a_trainer(algorithm=Offering(), store=store, initial_resources=None).dev(agent, [1])

    assert agent.seen == [seen]


def test_an_offer_that_is_no_mapping_is_told() -> None:
    class Wrong(Algorithm):
        def dev_resources(self) -> list[PromptTemplate]:
            return [OFFERED]

    with pytest.raises(TypeError, match=r"Wrong\.dev_resources\(\) must give the resources by name.* a list"):
        a_trainer(algorithm=Wrong()).dev(Looking(), [1])


def test_what_an_offer_raises_is_raised_and_fails_the_run() -> None:
    class Broken(Algorithm):
        def dev_resources(self) -> NamedResources:
            raise ConfigurationError("no model")

    trainer = a_trainer(algorithm=Broken())
    with pytest.raises(ConfigurationError, match="no model"):
        trainer.dev(Looking(), [1])

    assert [run.status for run in runs_of(trainer.store)] == ["failed"]


def test_a_fast_algorithm_is_run_itself() -> None:
    seen: list[Any] = []

    class Quick(FastAlgorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            seen.append((train_dataset, val_dataset))

    a_trainer(algorithm=Quick()).dev(Halving(), [1], [2])

    assert seen == [([1], [2])]


def test_gepa_offers_the_seed_prompt_and_the_trainers_proxy() -> None:
    pytest.importorskip("gepa")
    from agentlightning.algorithm.gepa import GEPA

    proxy = LLMProxy(model_list=[{"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": "http://x"}}])
    agent = Looking()

    a_trainer(algorithm=GEPA(str), llm_proxy=proxy).dev(agent, [1])

    (resources,) = agent.seen
    assert resources["prompt"] == RESOURCES["prompt"]
    assert isinstance(resources["main_llm"], ProxyLLM)
    assert not proxy.is_running()


@pytest.mark.slow
def test_sft_offers_its_model_before_training() -> None:
    pytest.importorskip("torch")
    from agentlightning.algorithm.sft import SFT

    agent = Looking()

    a_trainer(algorithm=SFT("tiny"), initial_resources=None).dev(agent, [1])

    (resources,) = agent.seen
    assert isinstance(resources["main_llm"], ProxyLLM)
    assert resources["main_llm"].sampling_parameters == {"temperature": 1.0}


def test_the_table_leaves_rewards_that_are_not_finite_out_of_its_mean(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["Infinity", "-Infinity", "NaN", "1.7e308", "1.7e308", "0.5"]

    @rollout
    def agent(task: str) -> None:
        emit_annotation({"agentops.task.output": f'{{"type": "reward", "value": {task}}}'})

    trainer = a_trainer(algorithm=None, progress="auto", tracer=OtelTracer(instrument=False))
    trainer.dev(agent, outputs)

    assert "6 rollouts, mean reward 0.50 of 1, 0 failed" in capsys.readouterr().out
    assert runs_of(trainer.store)[0].summary["reward_mean"] == 0.5


def test_dev_may_be_followed_by_a_fit() -> None:
    trainer = a_trainer()

    trainer.dev(Halving(), [1])
    trainer.fit(Halving(), [2])

    assert rewards_of(trainer.store) == [0.5, 1.0]
    assert [run.status for run in runs_of(trainer.store)] == ["succeeded", "succeeded"]


def test_an_agent_of_both_kinds_runs_to_its_end() -> None:
    class Both(LitAgent[Any]):
        async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
            return 1.0

        def validation_rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float:
            return 2.0

    trainer = a_trainer()
    trainer.dev(Both(), [1], [2])

    assert rewards_of(trainer.store) == [1.0, 2.0]


def test_the_table_shows_the_last_answer_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    @rollout
    def agent(task: str) -> float:
        emit_annotation({"gen_ai.completion.0.content": "first"})
        emit_annotation({"gen_ai.completion.0.content": "forty-two"})
        return 1.0

    a_trainer(progress="auto", tracer=OtelTracer()).dev(agent, ["question"])

    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["question", "forty-two", "1"]


@pytest.mark.parametrize("mode", ["off", "json"])
def test_the_environment_silences_the_table_too(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGL_PROGRESS", mode)

    a_trainer(progress="auto").dev(Halving(), [1])

    assert "task" not in capsys.readouterr().out


# ---------------------------------------------------------------------- the trainer's proxy


def test_proxy_of_the_trainer_that_cannot_start_fails_the_trial() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        proxy = LLMProxy(taken.getsockname()[1], [])

        with pytest.raises(RuntimeError, match="port"):
            a_trainer(llm_proxy=proxy).dev(Looking(), [1])
