"""What an algorithm does before runners may claim."""

import asyncio
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm import Algorithm
from agentlightning.errors import TrainingError
from agentlightning.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy
from agentlightning.store import SqliteLightningStore
from agentlightning.types import RolloutConfig
from tests.e2e.server_process import free_port
from tests.runner.working import PATIENCE_SECONDS, RESOURCES, Answering
from tests.trainer.trainings import Halving, a_trainer, runs_of

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PREPARING_SECONDS = 0.3
"""How long runners have to claim too early."""


class Withdrawing(Algorithm):
    """Cancels what is in the queue before runners start, then has one task run."""

    def __init__(self) -> None:
        self.statuses: list[str] = []

    async def before_runners(self) -> None:
        store = self.get_store()
        await asyncio.sleep(PREPARING_SECONDS)
        for rollout in await store.query_rollouts():
            self.statuses.append(rollout.status)
            await store.update_rollout(rollout.rollout_id, status="cancelled")

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:  # type: ignore[override] # a coroutine
        store = self.get_store()
        await store.add_resources(RESOURCES)
        rollout = await store.enqueue_rollout(2, config=RolloutConfig())
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=PATIENCE_SECONDS)


def strategies() -> list[Any]:
    return [
        pytest.param(lambda: SharedMemoryExecutionStrategy(), id="shm-runner"),
        pytest.param(lambda: SharedMemoryExecutionStrategy(n_runners=2, main_thread="algorithm"), id="shm-algorithm"),
        pytest.param(lambda: ClientServerExecutionStrategy(server_port=free_port(), n_runners=2), id="cs"),
        pytest.param(lambda: ClientServerExecutionStrategy(managed_store=False), id="cs-unmanaged"),
        pytest.param(
            lambda: ClientServerExecutionStrategy(server_port=free_port(), main_process="runner"), id="cs-runner"
        ),
    ]


@pytest.mark.parametrize("strategy", strategies())
def test_runners_claim_nothing_before_the_algorithm_has_prepared_the_store(strategy: Any, tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "s.db")
    asyncio.run(store.enqueue_rollout("left over"))

    a_trainer(strategy=strategy(), store=store, algorithm=Withdrawing()).fit(Halving())

    async def seen() -> tuple[list[str], int]:
        rollouts = await store.query_rollouts(sort_by="start_time")
        return [rollout.status for rollout in rollouts], len(await store.query_attempts(rollouts[0].rollout_id))

    statuses, attempts = asyncio.run(seen())
    asyncio.run(store.close())
    assert statuses == ["cancelled", "succeeded"]
    assert attempts == 0


def test_runners_of_another_process_find_no_store_before_it_is_prepared(tmp_path: Path) -> None:
    port, store = free_port(), SqliteLightningStore(tmp_path / "s.db")
    asyncio.run(store.enqueue_rollout("left over"))
    strategy = ClientServerExecutionStrategy(role="runner", server_port=port)
    remote = a_trainer(strategy=strategy, store="memory", algorithm=None)
    process = multiprocessing.get_context("fork").Process(target=remote.fit, args=(Halving(),))
    process.start()
    try:
        algorithm = Withdrawing()
        serving = ClientServerExecutionStrategy(role="algorithm", server_port=port)
        a_trainer(strategy=serving, store=store, algorithm=algorithm).fit(Halving())
    finally:
        process.kill()
        process.join()

    asyncio.run(store.close())
    assert algorithm.statuses == ["queuing"]


class Failing(Withdrawing):
    async def before_runners(self) -> None:
        raise TrainingError("the queue could not be read")


@pytest.mark.parametrize("strategy", strategies()[::2])
def test_a_preparation_that_fails_ends_the_training(strategy: Any, tmp_path: Path) -> None:
    store, ran = SqliteLightningStore(tmp_path / "s.db"), threading.Event()
    asyncio.run(store.enqueue_rollout(1))

    with pytest.raises((TrainingError, RuntimeError), match=r"could not be read|Subprocesses failed"):
        a_trainer(strategy=strategy(), store=store, algorithm=Failing()).fit(Answering(lambda _: ran.set()))

    assert not ran.is_set()
    assert [run.status for run in runs_of(store)] == ["failed"]
    asyncio.run(store.close())
