"""The algorithm's side of a training: what it does beside the algorithm."""

import asyncio
import logging
import queue
import threading
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm import algo
from agentlightning.errors import StoreUnavailable
from agentlightning.execution.events import ThreadingEvent
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.trainer import Trainer, sides
from agentlightning.trainer.sides import AlgorithmSide, Switches
from agentlightning.utils.daemon_threads import IDLE_SECONDS
from tests.runner.working import PATIENCE_SECONDS, until


async def test_a_worker_that_could_not_be_given_up_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, given_up, asked = InMemoryLightningStore(), asyncio.Event(), []

    async def failing_once(store: LightningStore, is_lost: Any, reason: str) -> list[str]:
        asked.append(is_lost)
        if len(asked) == 1:
            raise ConnectionError("the store is away")
        given_up.set()
        return []

    @algo
    async def waiting(*, store: Any) -> None:
        await asyncio.wait_for(given_up.wait(), PATIENCE_SECONDS)

    monkeypatch.setattr(sides, "SILENCE_SECONDS", 0.04)
    monkeypatch.setattr(sides, "recover_attempts", failing_once)
    monkeypatch.setattr(sides, "_is_silent", lambda worker, now: True)
    await store.update_worker("Worker-7", {})
    await store.enqueue_rollout(1)
    await store.dequeue_rollout(worker_id="Worker-7")
    switches = Switches(ThreadingEvent(), ThreadingEvent(), ThreadingEvent())
    side = AlgorithmSide(waiting, Trainer(), TracerTraceToTriplet(), switches)

    with caplog.at_level(logging.WARNING):
        await side.run(store, ThreadingEvent())

    assert len(asked) >= 2
    assert "the store is away" in caplog.text


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
