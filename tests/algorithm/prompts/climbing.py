"""Whole optimisations on the simulated model: Trainer, store, LLM proxy, agents that call through it, APO or GEPA."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import openai

import agentlightning as agl
from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.apo import OptimisationResult
from agentlightning.algorithm.apo.apo import APO
from agentlightning.algorithm.gepa import GEPA
from agentlightning.llm_proxy import LLMProxy
from tests.simulated_model.bookings import Task, make_tasks
from tests.simulated_model.server import MODEL, SEED_PROMPT, SimulatedModel

TRAIN_TASKS, VALIDATION_TASKS, TEST_TASKS = 60, 150, 100
SETTINGS: dict[str, Any] = {
    "gradient_batch_size": 8,
    "val_batch_size": 12,
    "beam_width": 2,
    "branch_factor": 2,
    "beam_rounds": 6,
}


class Booking(agl.LitAgent[dict[str, str]]):
    """Puts the request into the prompt, asks the model through the proxy, and is judged by the right line."""

    def __init__(self, client: openai.OpenAI) -> None:
        super().__init__()
        self._client = client

    def rollout(self, task: dict[str, str], resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"].with_attempted_rollout(rollout)
        messages: Any = [{"role": "user", "content": resources["prompt"].format(request=task["text"])}]
        client = self._client.with_options(base_url=f"{llm.endpoint}/v1")
        reply = client.chat.completions.create(model=llm.model, messages=messages)
        judged = Task(task["text"], task["answer"], frozenset())
        return judged.score(reply.choices[0].message.content or "")


def tasks(count: int, seed: int) -> list[dict[str, str]]:
    return [{"text": task.text, "answer": task.answer} for task in make_tasks(count, seed)]


@contextmanager
def proxied(model: SimulatedModel, store: agl.LightningStore) -> Iterator[LLMProxy]:
    """A running proxy before the model."""
    served = {"model": f"hosted_vllm/{MODEL}", "api_base": model.url}
    proxy = LLMProxy(0, [{"model_name": MODEL, "litellm_params": served}], store)
    proxy.start()
    try:
        yield proxy
    finally:  # in a thread, where the stop does not go on in the background
        stopping = threading.Thread(target=proxy.stop)
        stopping.start()
        stopping.join()


@dataclass(frozen=True)
class Climb:
    """What an optimisation came to."""

    seed: int
    apo: APO[Any]
    result: OptimisationResult
    seed_test_score: float
    best_test_score: float
    """On tasks that the optimisation has not seen."""
    store: agl.LightningStore


def test_score(model: SimulatedModel, prompt: agl.PromptTemplate, seed: int, count: int) -> float:
    """The mean score on tasks of their own."""
    with openai.OpenAI(base_url=model.url, api_key="any") as client:
        scores = []
        for task in make_tasks(count, seed):
            messages: Any = [{"role": "user", "content": prompt.format(request=task.text)}]
            reply = client.chat.completions.create(model=MODEL, messages=messages)
            scores.append(task.score(reply.choices[0].message.content or ""))
    return sum(scores) / len(scores)


test_score.__test__ = False  # type: ignore[attr-defined] # it is no test


def climb(
    seed: int,
    *,
    faults: float = 0.0,
    is_steady: bool = False,
    validation_tasks: int = VALIDATION_TASKS,
    test_tasks: int = TEST_TASKS,
    search_seed: int | None = None,
    **settings: Any,
) -> Climb:
    """Optimise the prompt of the booking agent; the seed is that of model, tasks and, unless it has another, APO."""
    store = agl.InMemoryLightningStore()
    seed_prompt = agl.PromptTemplate(template=SEED_PROMPT, engine="f-string")
    with SimulatedModel(seed, faults=faults, is_steady=is_steady) as model, proxied(model, store) as proxy:
        apo: APO[Any] = APO(**{**SETTINGS, "seed": seed if search_seed is None else search_seed, **settings})
        trainer = agl.Trainer(
            algorithm=apo,
            adapter=TraceToMessages(),
            store=store,
            strategy=agl.SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm"),
            initial_resources={"prompt": seed_prompt, "main_llm": proxy.as_resource()},
            llm_proxy=proxy,
            progress="off",
        )
        environment = patch.dict(os.environ, {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": model.url})
        with openai.OpenAI(base_url=model.url, api_key="any", max_retries=0) as client, environment:
            trainer.fit(Booking(client), tasks(TRAIN_TASKS, seed), tasks(validation_tasks, seed + 1000))
        assert apo.result is not None
        before = test_score(model, seed_prompt, seed + 2000, test_tasks)
        after = test_score(model, apo.get_best_prompt(), seed + 2000, test_tasks)
    return Climb(seed, apo, apo.result, before, after, store)


@dataclass(frozen=True)
class Evolved:
    """What an optimisation came to."""

    gepa: GEPA
    result: OptimisationResult
    seed_test_score: float
    best_test_score: float
    """On tasks that the optimisation has not seen."""
    store: agl.LightningStore


def evolve(
    seed: int,
    *,
    faults: float = 0.0,
    is_steady: bool = False,
    validation_tasks: int = 60,
    test_tasks: int = TEST_TASKS,
    store: Any = None,
    search_seed: int | None = None,
    **settings: Any,
) -> Evolved:
    """Optimise the prompt of the booking agent. The proxy is the algorithm's to start, and to hand to the agents."""
    store = agl.InMemoryLightningStore() if store is None else store
    seed_prompt = agl.PromptTemplate(template=SEED_PROMPT, engine="f-string")
    with SimulatedModel(seed, faults=faults, is_steady=is_steady) as model:
        gepa = GEPA(**{"minibatch_size": 8, "seed": seed if search_seed is None else search_seed, **settings})
        served = {"model": f"hosted_vllm/{MODEL}", "api_base": model.url}
        trainer = agl.Trainer(
            algorithm=gepa,
            store=store,
            strategy=agl.SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm"),
            initial_resources={"prompt": seed_prompt},
            llm_proxy=agl.LLMProxy(0, [{"model_name": MODEL, "litellm_params": served}]),
            progress="off",
        )
        environment = patch.dict(os.environ, {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": model.url})
        with openai.OpenAI(base_url=model.url, api_key="any", max_retries=0) as client, environment:
            trainer.fit(Booking(client), tasks(40, seed), tasks(validation_tasks, seed + 1000))
        assert gepa.result is not None
        before = test_score(model, seed_prompt, seed + 2000, test_tasks)
        after = test_score(model, gepa.get_best_prompts()["prompt"], seed + 2000, test_tasks)
    return Evolved(gepa, gepa.result, before, after, store)
