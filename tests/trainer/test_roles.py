"""The algorithm's role in a training: what it does beside the algorithm."""

import asyncio
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

import agentlightning
from agentlightning.algorithm import Algorithm, algo
from agentlightning.errors import StoreUnavailable
from agentlightning.execution.events import ControlFlags, ThreadingEvent
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.trainer.roles import AlgorithmRole
from agentlightning.utils.daemon_threads import IDLE_SECONDS
from tests.runner.working import PATIENCE_SECONDS, Answering, until


def role_of(algorithm: Algorithm, **options: Any) -> AlgorithmRole:
    flags = ControlFlags(ThreadingEvent(), ThreadingEvent(), ThreadingEvent())
    return AlgorithmRole(algorithm, Trainer(progress="off"), flags, **options)


@pytest.mark.parametrize("is_function", [True, False], ids=["function", "method"])
async def test_a_plain_algorithm_that_was_stopped_loses_the_store(is_function: bool) -> None:
    store, has_begun, endings = InMemoryLightningStore(), threading.Event(), queue.SimpleQueue[BaseException]()

    def endless(store: Any) -> None:
        try:
            while True:
                store.enqueue_rollout(1)
                has_begun.set()
        except BaseException as error:
            endings.put(error)
            raise

    class Endless(Algorithm):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            endless(self.get_store())

    role = role_of(algo(endless) if is_function else Endless())
    running = asyncio.create_task(role(store, ThreadingEvent()))
    assert await asyncio.to_thread(has_begun.wait, PATIENCE_SECONDS)

    role.flags.stopped.set()
    await asyncio.wait_for(running, PATIENCE_SECONDS)
    count = len(await store.query_rollouts())
    ending = await asyncio.to_thread(endings.get, timeout=PATIENCE_SECONDS)

    assert role.was_stopped
    assert isinstance(ending, StoreUnavailable)
    assert len(await store.query_rollouts()) == count


async def test_a_plain_function_that_fails_leaves_no_thread() -> None:
    @algo
    def failing(*, store: Any) -> None:
        raise ValueError("it never works")

    with pytest.raises(ValueError, match="it never works"):
        await role_of(failing)(InMemoryLightningStore(), ThreadingEvent())

    await until(lambda: not any(t.name.startswith("algorithm") for t in threading.enumerate()), IDLE_SECONDS / 2)


async def test_a_bare_wait_goes_on_when_all_workers_are_gone() -> None:
    store = InMemoryLightningStore(lost_worker_seconds=0.05)
    rollout = await store.enqueue_rollout("task")
    await store.update_worker("w", {"interval_seconds": 0.01})

    waiting = asyncio.ensure_future(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
    done, _ = await asyncio.wait([waiting], timeout=0.5)

    assert not done
    waiting.cancel()


@pytest.mark.parametrize("strategy", [{"type": "shm", "main_thread": "algorithm"}, {"type": "cs", "server_port": 0}])
def test_four_frames_lie_between_fit_and_the_algorithm(strategy: dict[str, Any]) -> None:
    package = str(Path(agentlightning.__file__).parent)

    class Failing(Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here") as raised:
        Trainer(algorithm=Failing(), strategy=strategy, progress="off").fit(Answering(lambda _: 1.0))

    ours = [entry.name for entry in raised.traceback if str(entry.path).startswith(package)]
    assert ours == ["fit", "_fit", "execute", "_execute_algorithm", "__call__"]
