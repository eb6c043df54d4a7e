"""Runners that are killed during a fit: harmless where their work was done after all."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm import algo
from agentlightning.execution import ClientServerExecutionStrategy
from agentlightning.store import LightningStore
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS, is_lost
from agentlightning.types import RolloutConfig
from agentlightning.types.lifecycle import LifecycleState
from tests.e2e.server_process import free_port
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering
from tests.trainer.trainings import a_trainer, runs_of

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def enqueueing(count: int, config: RolloutConfig) -> Any:
    @algo
    async def algorithm(*, store: LightningStore) -> None:
        await store.add_resources(RESOURCES)
        ids = [(await store.enqueue_rollout(number, config=config)).rollout_id for number in range(count)]
        assert len(await store.wait_for_rollouts(rollout_ids=ids, timeout=PATIENCE_SECONDS)) == count

    return algorithm


def killed_once(flag: Path) -> Answering:
    def answer(_: Any) -> float:
        try:
            flag.touch(exist_ok=False)
        except FileExistsError:
            return 1.0
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    return Answering(answer)


def two_processes() -> ClientServerExecutionStrategy:
    return ClientServerExecutionStrategy(server_port=free_port(), n_runners=2)


def test_a_fit_whose_killed_runner_did_no_harm_returns_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer(strategy=two_processes(), algorithm=enqueueing(6, RolloutConfig()))

    with caplog.at_level(logging.WARNING):
        trainer.fit(killed_once(tmp_path / "died"))

    rollouts = asyncio.run(trainer.store.query_rollouts())
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 6
    assert [run.status for run in runs_of(trainer.store)] == ["succeeded"]
    assert trainer.state is LifecycleState.STOPPED
    assert "Subprocesses failed: " in caplog.text
    assert "Nothing is lost" in caplog.text


def test_a_fit_that_lost_a_rollout_with_its_runner_raises(tmp_path: Path) -> None:
    config = RolloutConfig(requeue_lost=False)
    trainer = a_trainer(strategy=two_processes(), algorithm=enqueueing(6, config))

    with pytest.raises(RuntimeError, match=r"Subprocesses failed: .*exit code -9"):
        trainer.fit(killed_once(tmp_path / "died"))

    statuses = [rollout.status for rollout in asyncio.run(trainer.store.query_rollouts())]
    assert sorted(statuses) == ["failed", *["succeeded"] * 5]


def test_a_fit_whose_only_runner_was_killed_raises(tmp_path: Path) -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port())
    trainer = a_trainer(strategy=strategy, algorithm=enqueueing(2, RolloutConfig()))

    with pytest.raises(RuntimeError, match="Subprocesses failed"):
        trainer.fit(killed_once(tmp_path / "died"))

    assert [run.status for run in runs_of(trainer.store)] != ["succeeded"]


def test_a_killed_runner_that_is_started_again_costs_no_try_and_no_lease(tmp_path: Path) -> None:
    strategy = ClientServerExecutionStrategy(server_port=free_port(), max_restarts=1)
    config = RolloutConfig(max_attempts=1, retry_condition=["unresponsive"])
    trainer = a_trainer(strategy=strategy, algorithm=enqueueing(3, config))

    trainer.fit(killed_once(tmp_path / "died"))

    rollouts = asyncio.run(trainer.store.query_rollouts())
    tries = [list(asyncio.run(trainer.store.query_attempts(rollout.rollout_id))) for rollout in rollouts]
    assert sorted(len(attempts) for attempts in tries) == [1, 1, 2]
    lost, again = next(attempts for attempts in tries if len(attempts) == 2)
    assert is_lost(lost)
    assert [attempts[-1].status for attempts in tries] == ["succeeded"] * 3
    assert again.worker_id == f"{lost.worker_id}-1"
    assert again.start_time - lost.start_time < LOST_WORKER_SECONDS / 2
