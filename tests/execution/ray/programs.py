"""Agents and algorithms for trainings on a cluster; nested, so that they travel whole."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.errors import TrainingError

PATIENCE_SECONDS = 60.0


def trainer(algorithm: Any, **options: Any) -> agl.Trainer:
    strategy = {
        "type": "ray",
        "runtime_env": {"working_dir": None},
        "server_port": 0,
        "graceful_timeout": 0.5,
        **options,
    }
    return agl.Trainer(algorithm=algorithm, strategy=strategy, store=agl.InMemoryLightningStore(), progress="off")


def waiting_agent(folder: Path) -> Any:
    """Leaves a file named after its node and process, and ends when there is a file `go`."""
    place = str(folder)

    async def agent(task: Any) -> float:
        import ray

        node = ray.get_runtime_context().get_node_id()
        Path(place, f"{node}-{os.getpid()}").touch()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not Path(place, "go").exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return 1.0

    return agl.rollout(agent)


def counting_agent() -> Any:
    async def agent(task: Any) -> float:
        return float(task)

    return agl.rollout(agent)


def sends(count: int, meanwhile: Callable[[Any], Awaitable[None]] | None = None) -> Any:
    """An algorithm that has so many rollouts run, and checks that each has exactly one attempt that succeeded."""

    @agl.algo
    async def algorithm(*, store: Any) -> None:
        sent = [(await store.enqueue_rollout(input=number)).rollout_id for number in range(count)]
        if meanwhile is not None:
            await meanwhile(store)
        done: Sequence[Any] = await store.wait_for_rollouts(rollout_ids=sent, timeout=PATIENCE_SECONDS)
        assert [rollout.status for rollout in done] == ["succeeded"] * count
        for rollout_id in sent:
            attempts = await store.query_attempts(rollout_id)
            assert [attempt.status for attempt in attempts].count("succeeded") == 1

    return algorithm


async def until(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        result = is_true()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        if time.monotonic() > deadline:
            raise TrainingError("it did not come in time")
        await asyncio.sleep(0.02)
