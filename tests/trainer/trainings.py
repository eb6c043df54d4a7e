"""Small trainings, and what they left in the store."""

import asyncio
import threading
import time
from typing import Any

from agentlightning.algorithm import Baseline, algo
from agentlightning.emitter import find_final_reward
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.litagent import LitAgent
from agentlightning.store import LightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.trainer import Trainer
from agentlightning.types import NamedResources, Rollout, RolloutRawResult, Run
from agentlightning.types.lifecycle import LifecycleState
from tests.e2e.server_process import free_port
from tests.runner.working import PATIENCE_SECONDS, RESOURCES

__all__ = ["Halving", "a_trainer", "endless", "fitting", "over_processes", "rewards_of", "runs_of", "until"]


class Halving(LitAgent[Any]):
    """Rewards half of its task."""

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return task / 2


def a_trainer(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "strategy": "shm",
        "progress": "off",
        "initial_resources": RESOURCES,
        "tracer": DummyTracer(),
        "algorithm": Baseline(polling_interval=0.1),
    }
    return Trainer(**{**defaults, **options})


def over_processes(**options: Any) -> Trainer:
    return a_trainer(
        **{"strategy": ClientServerExecutionStrategy(server_port=free_port(), n_runners=options.pop("n", 1)), **options}
    )


def runs_of(store: LightningStore) -> list[Run]:
    return list(asyncio.run(store.query_runs()))


def rewards_of(store: LightningStore) -> list[float | None]:
    async def read() -> list[float | None]:
        rollouts = await store.query_rollouts(sort_by="start_time")
        return [find_final_reward(list(await store.query_spans(r.rollout_id))) for r in rollouts]

    return asyncio.run(read())


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.01)


def fitting(trainer: Trainer, agent: LitAgent[Any], *datasets: Any) -> threading.Thread:
    thread = threading.Thread(target=trainer.fit, args=(agent, *datasets), name="fitting", daemon=True)
    thread.start()
    until(lambda: trainer.state is LifecycleState.RUNNING)
    return thread


@algo
async def endless(*, store: LightningStore) -> None:
    await asyncio.sleep(1000)
