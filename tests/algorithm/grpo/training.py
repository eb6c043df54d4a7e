"""Small trainings: an agent that asks the model once, an engine that several trainings share, and what they leave."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import torch

import agentlightning as agl
from agentlightning.algorithm.grpo.grpo import GRPO
from agentlightning.algorithm.grpo.settings import LearnerSettings
from agentlightning.engine.weights import PublishedWeights
from agentlightning.types import Rollout

Judge = Callable[["Asking", Any, Rollout, str], float]
PATIENCE_SECONDS = 60.0
TASKS = [f"say {number}" for number in range(40, 64)]


def settings(**changes: Any) -> LearnerSettings:
    return LearnerSettings(**{"threads": 1, **changes})


async def ask(llm: Any, rollout: Any, question: str, *, agent: str | None = None, **options: Any) -> str:
    """One chat completion on behalf of an attempt; what was said."""
    bound = llm.with_attempted_rollout(rollout)
    url = bound.endpoint if agent is None else f"{bound.endpoint.removesuffix('/v1')}/agent/{agent}/v1"
    body = {
        "model": bound.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 6,
        **bound.sampling_parameters,
        **options,
    }
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        answer = await client.post(f"{url}/chat/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"] or "")


class Asking(agl.LitAgent[Any]):
    """Asks once, with a seed by how often the task came before, and has a function judge the answer.

    So the rollouts of a group differ from each other, and a training that is repeated is the same.
    """

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self.judge = judge
        self.seen: Counter[str] = Counter()
        self.order: list[str] = []
        self.answered = threading.Condition()
        self.steps_answered: set[int] = set()

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        key = f"{rollout.mode}/{task}"
        self.seen[key] += 1
        self.order.append(key)
        said = await ask(resources["main_llm"], rollout, str(task), seed=self.seen[key])
        with self.answered:
            self.steps_answered.add((rollout.metadata or {}).get("step", -1))
            self.answered.notify_all()
        return self.judge(self, task, rollout, said)

    def await_step(self, step: int) -> bool:
        """Wait until a rollout of a step has its answer."""
        with self.answered:
            return self.answered.wait_for(lambda: step in self.steps_answered, timeout=PATIENCE_SECONDS)


class SharedEngine:
    """Stands for an engine of its own that is started and stopped, where one is enough for many trainings."""

    def __init__(self, engine: Any, model: Any) -> None:
        self.engine = engine
        self.model = model
        self.base = model.state()
        self.published: list[int] = []

    def __call__(self, model: str, **options: Any) -> "SharedEngine":
        return self

    def start(self) -> None:
        self.engine.publish(0, PublishedWeights(self.model, seed=0))
        self.published.clear()

    def stop(self) -> None:
        """It goes on for others."""

    def publish(self, version: int, weights: Any) -> None:
        self.engine.publish(version, weights)
        self.published.append(version)

    def is_running(self) -> bool:
        return bool(self.engine.is_running())

    def status(self) -> Any:
        return self.engine.status()

    def model_config(self) -> Any:
        return self.engine.model_config()


@contextmanager
def shared_engine() -> Iterator[SharedEngine]:
    from agentlightning.engine.checkpoint import load
    from agentlightning.engine.embedded import EngineServer

    with EngineServer("tiny") as engine:
        yield SharedEngine(engine, load("tiny")[0])


def trainer(algorithm: GRPO, *, concurrency: int = 4, **options: Any) -> agl.Trainer:
    """Everything in this process, with the algorithm in the test's own thread."""
    return agl.Trainer(
        algorithm=algorithm,
        strategy=agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm"),
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": concurrency, "poll_interval": 0.05},
        tracer=agl.OtelTracer(instrument=False),
        progress="off",
        **options,
    )


def grpo(**changes: Any) -> GRPO:
    """Few steps of small groups."""
    options: dict[str, Any] = {"group_size": 2, "tasks_per_step": 2, "steps": 3, "learning": settings()}
    return GRPO(**{**options, **changes})


def fit(algorithm: GRPO, agent: Any = None, **options: Any) -> agl.Trainer:
    made = trainer(algorithm, **{"concurrency": 1, **options})
    made.fit(agent or Asking(every_second), TASKS)
    return made


def every_second(agent: Asking, task: Any, rollout: Any, said: str) -> float:
    """Half of every group does well."""
    return float(agent.seen[f"{rollout.mode}/{task}"] % 2)


def weights(algorithm: GRPO, number: int = 0) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in algorithm.policies[number].model.state().items()}


def are_same(left: dict[str, Any], right: Any) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def curve(made: agl.Trainer, *names: str) -> list[dict[str, float]]:
    """The points of the last run that have these figures."""

    async def read() -> list[dict[str, float]]:
        runs = await made.store.query_runs()
        points = await made.store.query_metrics(runs[-1].run_id, names=names)
        return [point.values for point in points]

    return asyncio.run(read())
