"""Two trainings on one store: each settles what its own runners leave behind, and nothing else."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm import algo
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.types import Attempt, Rollout, RolloutConfig
from tests.e2e.server_process import free_port
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering
from tests.trainer.trainings import a_trainer, fitting

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def running(task: str) -> Any:
    """An algorithm that has one task run."""

    @algo
    async def algorithm(*, store: LightningStore) -> None:
        await store.add_resources(RESOURCES)
        config = RolloutConfig(max_attempts=3, retry_condition=["unresponsive"])
        rollout = await store.enqueue_rollout(task, config=config)
        assert await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=PATIENCE_SECONDS)

    return algorithm


def killed_once(flag: Path) -> Answering:
    """An agent whose process dies the first time it runs."""

    def answer(_: Any) -> None:
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return Answering(answer)


async def attempts_by_task(path: Path) -> dict[Any, list[Attempt]]:
    async with SqliteLightningStore(path) as store:
        rollouts: list[Rollout] = list(await store.query_rollouts())
        return {rollout.input: list(await store.query_attempts(rollout.rollout_id)) for rollout in rollouts}


def test_a_killed_runner_of_one_training_leaves_the_work_of_another_alone(tmp_path: Path) -> None:
    address, has_begun, may_end = f"sqlite:///{tmp_path / 'shared.db'}", threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)

    healthy = a_trainer(store=address, algorithm=running("healthy"))
    fit = fitting(healthy, Answering(hold))
    assert has_begun.wait(PATIENCE_SECONDS)
    strategy = ClientServerExecutionStrategy(server_port=free_port(), max_restarts=1)
    crashing = a_trainer(store=address, algorithm=running("crashing"), strategy=strategy)
    try:
        crashing.fit(killed_once(tmp_path / "died"))
    finally:
        may_end.set()
        fit.join(PATIENCE_SECONDS)
        asyncio.run(crashing.store.close())
        asyncio.run(healthy.store.close())

    attempts = asyncio.run(attempts_by_task(tmp_path / "shared.db"))
    assert [attempt.status for attempt in attempts["healthy"]] == ["succeeded"]
    assert [attempt.status for attempt in attempts["crashing"]] == ["unresponsive", "succeeded"]
    assert len({attempt.worker_id for of_task in attempts.values() for attempt in of_task}) == 3
