"""The algorithm's side of a training: what it does beside the algorithm."""

import asyncio
import queue
import threading
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm import Algorithm, algo
from agentlightning.errors import StoreUnavailable, TrainingError
from agentlightning.execution.events import ThreadingEvent
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.trainer.sides import AlgorithmSide, Switches
from agentlightning.utils.daemon_threads import IDLE_SECONDS
from tests.runner.working import PATIENCE_SECONDS, until


async def test_a_plain_function_that_was_stopped_loses_the_store() -> None:
    store, has_begun, endings = InMemoryLightningStore(), threading.Event(), queue.SimpleQueue[BaseException]()

    @algo
    def endless(*, store: Any) -> None:
        try:
            while True:
                store.enqueue_rollout(1)
                has_begun.set()
        except BaseException as error:
            endings.put(error)
            raise

    switches = Switches(ThreadingEvent(), ThreadingEvent(), ThreadingEvent())
    side = AlgorithmSide(endless, Trainer(), TracerTraceToTriplet(), switches)
    running = asyncio.create_task(side.run(store, ThreadingEvent()))
    assert await asyncio.to_thread(has_begun.wait, PATIENCE_SECONDS)

    switches.stopped.set()
    await asyncio.wait_for(running, PATIENCE_SECONDS)
    count = len(await store.query_rollouts())
    ending = await asyncio.to_thread(endings.get, timeout=PATIENCE_SECONDS)

    assert side.was_stopped
    assert isinstance(ending, StoreUnavailable)
    assert len(await store.query_rollouts()) == count


async def test_a_plain_run_that_was_stopped_loses_the_store() -> None:
    has_begun, endings = threading.Event(), queue.SimpleQueue[BaseException]()

    class Endless(Algorithm):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            try:
                while True:
                    store: Any = self.get_store()
                    store.query_rollouts()
                    has_begun.set()
            except BaseException as error:
                endings.put(error)
                raise

    switches = Switches(ThreadingEvent(), ThreadingEvent(), ThreadingEvent())
    side = AlgorithmSide(Endless(), Trainer(), TracerTraceToTriplet(), switches)
    running = asyncio.create_task(side.run(InMemoryLightningStore(), ThreadingEvent()))
    assert await asyncio.to_thread(has_begun.wait, PATIENCE_SECONDS)

    switches.stopped.set()
    await asyncio.wait_for(running, PATIENCE_SECONDS)

    assert isinstance(await asyncio.to_thread(endings.get, timeout=PATIENCE_SECONDS), StoreUnavailable)


async def test_a_plain_function_that_fails_leaves_no_thread() -> None:
    @algo
    def failing(*, store: Any) -> None:
        raise ValueError("it never works")

    switches = Switches(ThreadingEvent(), ThreadingEvent(), ThreadingEvent())
    side = AlgorithmSide(failing, Trainer(), TracerTraceToTriplet(), switches)

    with pytest.raises(ValueError, match="it never works"):
        await side.run(InMemoryLightningStore(), ThreadingEvent())

    await until(lambda: not any(t.name.startswith("algorithm") for t in threading.enumerate()), IDLE_SECONDS / 2)


def waiting_side(*, deserted_seconds: float) -> AlgorithmSide:
    """An algorithm that enqueues a rollout and waits for it without end."""

    @algo
    async def waiting(*, store: Any) -> None:
        rollout = await store.enqueue_rollout("task")
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    switches = Switches(ThreadingEvent(), ThreadingEvent(), ThreadingEvent())
    return AlgorithmSide(
        waiting, Trainer(), TracerTraceToTriplet(), switches, deserted_seconds=deserted_seconds, llm_proxy=None
    )


async def test_a_training_whose_workers_are_all_gone_ends_with_an_error() -> None:
    store, side = InMemoryLightningStore(), waiting_side(deserted_seconds=0.4)
    running = asyncio.create_task(side.run(store, ThreadingEvent()))
    await until(lambda: side.switches.prepared.is_set())

    await store.update_worker("w", {})

    with pytest.raises(TrainingError, match="No worker is left"):
        await asyncio.wait_for(running, PATIENCE_SECONDS)
    assert not side.is_done


@pytest.mark.parametrize("reason", ["no worker has come yet", "a worker without heartbeats is busy"])
async def test_a_training_waits_on_while_somebody_may_work_for_it(reason: str) -> None:
    store, side = InMemoryLightningStore(), waiting_side(deserted_seconds=0.02)
    running = asyncio.create_task(side.run(store, ThreadingEvent()))
    await until(lambda: side.switches.prepared.is_set())
    if "busy" in reason:
        assert await store.dequeue_rollout(worker_id="w", wait=PATIENCE_SECONDS) is not None

    done, _ = await asyncio.wait([running], timeout=0.5)

    assert not done
    side.switches.stopped.set()
    await asyncio.wait_for(running, PATIENCE_SECONDS)


async def test_a_bare_wait_goes_on_when_all_workers_are_gone() -> None:
    store = InMemoryLightningStore(lost_worker_seconds=0.05)
    rollout = await store.enqueue_rollout("task")
    await store.update_worker("w", {"interval_seconds": 0.01})

    waiting = asyncio.ensure_future(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id]))
    done, _ = await asyncio.wait([waiting], timeout=0.5)

    assert not done
    waiting.cancel()
