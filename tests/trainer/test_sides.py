"""The algorithm's side of a training: what it does beside the algorithm."""

import asyncio
import queue
import threading
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm import algo
from agentlightning.errors import StoreUnavailable
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


async def test_a_plain_function_that_fails_leaves_no_thread() -> None:
    @algo
    def failing(*, store: Any) -> None:
        raise ValueError("it never works")

    switches = Switches(ThreadingEvent(), ThreadingEvent(), ThreadingEvent())
    side = AlgorithmSide(failing, Trainer(), TracerTraceToTriplet(), switches)

    with pytest.raises(ValueError, match="it never works"):
        await side.run(InMemoryLightningStore(), ThreadingEvent())

    await until(lambda: not any(t.name.startswith("algorithm") for t in threading.enumerate()), IDLE_SECONDS / 2)
