"""A whole optimisation on the simulated model: Trainer, store, LLM proxy, agents that call through it, and GEPA."""

import os
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import openai

import agentlightning as agl
from agentlightning.algorithm.gepa import GEPA, OptimisationResult
from tests.algorithm.apo.climbing import TEST_TASKS, Booking, tasks, test_score
from tests.simulated_model.server import MODEL, SEED_PROMPT, SimulatedModel

TRAIN_TASKS, VALIDATION_TASKS = 40, 60
SETTINGS: dict[str, Any] = {"minibatch_size": 8}


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
    validation_tasks: int = VALIDATION_TASKS,
    test_tasks: int = TEST_TASKS,
    store: Any = None,
    search_seed: int | None = None,
    **settings: Any,
) -> Evolved:
    """Optimise the prompt of the booking agent. The proxy is the algorithm's to start, and to hand to the agents."""
    store = agl.InMemoryLightningStore() if store is None else store
    seed_prompt = agl.PromptTemplate(template=SEED_PROMPT, engine="f-string")
    with SimulatedModel(seed, faults=faults, is_steady=is_steady) as model:
        gepa = GEPA(**{**SETTINGS, "seed": seed if search_seed is None else search_seed, **settings})
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
            trainer.fit(Booking(client), tasks(TRAIN_TASKS, seed), tasks(validation_tasks, seed + 1000))
        assert gepa.result is not None
        before = test_score(model, seed_prompt, seed + 2000, test_tasks)
        after = test_score(model, gepa.get_best_prompts()["prompt"], seed + 2000, test_tasks)
    return Evolved(gepa, gepa.result, before, after, store)
