"""Whole optimisations on the simulated model: Trainer, store, LLM proxy, agents that call through it, APO or GEPA."""

import os
import threading
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import openai

import agentlightning as agl
from agentlightning.algorithm.apo import OptimisationResult
from agentlightning.algorithm.apo.apo import APO
from agentlightning.algorithm.gepa import GEPA
from tests.simulated_model.bookings import Task, make_tasks
from tests.simulated_model.server import MODEL, SEED_PROMPT, SimulatedModel

TRAIN_TASKS, TEST_TASKS = 40, 50
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


@dataclass(frozen=True)
class Optimised:
    """What an optimisation came to."""

    algorithm: Any
    result: OptimisationResult
    seed_test_score: float
    best_test_score: float
    """On tasks that the optimisation has not seen."""
    store: agl.LightningStore


def mean_score(model: SimulatedModel, prompt: agl.PromptTemplate, seed: int) -> float:
    """The mean score on tasks of their own."""
    with openai.OpenAI(base_url=model.url, api_key="any") as client:
        scores = []
        for task in make_tasks(TEST_TASKS, seed):
            messages: Any = [{"role": "user", "content": prompt.format(request=task.text)}]
            reply = client.chat.completions.create(model=MODEL, messages=messages)
            scores.append(task.score(reply.choices[0].message.content or ""))
    return sum(scores) / len(scores)


def climb(seed: int, *, faults: float = 0.0) -> Optimised:
    """Optimise the prompt of the booking agent with APO; the proxy runs already, and is one of the resources."""
    store = agl.InMemoryLightningStore()
    with SimulatedModel(seed, faults=faults) as model:
        proxy = _proxy(model, store)
        proxy.start()
        try:
            return _optimised(APO(**SETTINGS, seed=seed), model, proxy, n_val=100, main_llm=proxy.as_resource())
        finally:  # in a thread, where the stop does not go on in the background
            stopping = threading.Thread(target=proxy.stop)
            stopping.start()
            stopping.join()


def evolve(seed: int, *, faults: float = 0.0, **settings: Any) -> Optimised:
    """The same with GEPA. The proxy is the algorithm's to start, and to hand to the agents."""
    with SimulatedModel(seed, faults=faults) as model:
        gepa = GEPA(minibatch_size=8, seed=seed, **settings)
        return _optimised(gepa, model, _proxy(model, agl.InMemoryLightningStore()), n_val=60)


def _proxy(model: SimulatedModel, store: agl.LightningStore) -> agl.LLMProxy:
    served = {"model": f"hosted_vllm/{MODEL}", "api_base": model.url}
    return agl.LLMProxy(0, [{"model_name": MODEL, "litellm_params": served}], store)


def _optimised(
    algorithm: Any, model: SimulatedModel, proxy: agl.LLMProxy, *, n_val: int, **resources: Any
) -> Optimised:
    store: Any = proxy.get_store()
    prompt = agl.PromptTemplate(template=SEED_PROMPT, engine="f-string")
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=store,
        strategy=agl.SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm"),
        initial_resources={"prompt": prompt, **resources},
        llm_proxy=proxy,
        progress="off",
    )
    environment = patch.dict(os.environ, {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": model.url})
    with openai.OpenAI(base_url=model.url, api_key="any", max_retries=0) as client, environment:
        trainer.fit(Booking(client), tasks(TRAIN_TASKS, model.seed), tasks(n_val, model.seed + 1000))
    best = algorithm.get_best_prompts()["prompt"]
    before, after = (mean_score(model, one, model.seed + 2000) for one in (prompt, best))
    return Optimised(algorithm, algorithm.result, before, after, store)
