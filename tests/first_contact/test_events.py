"""What an agent says is in the store at once, as what it is."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter import Framework, detect_framework
from agentlightning.events import (
    BinaryReward,
    CompleteEvent,
    ErrorEvent,
    StartEvent,
    StreamOptions,
    by_task,
    of_kind,
    span_of,
    stream_events,
)
from agentlightning.types import AttemptedRollout

PATIENCE_SECONDS = 60.0


@dataclass
class Running:
    """An attempt whose trace is open."""

    store: agl.InMemoryLightningStore
    rollout: AttemptedRollout


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    with agl.OtelTracer(instrument=False).lifespan() as tracer:
        async with tracer.trace_context(store=store, **ids):
            yield Running(store, rollout)


@pytest.mark.claim(351)
async def test_a_step_that_takes_a_while_is_seen_when_it_begins(running: Running) -> None:
    async with stream_events(running.store, transform=of_kind("state")) as stream:
        with agl.operation(name="search"):
            (begun,) = await asyncio.wait_for(anext(stream), PATIENCE_SECONDS)
            progress = by_task([begun])[running.rollout.rollout_id].progress
        (ended,) = await asyncio.wait_for(anext(stream), PATIENCE_SECONDS)

    assert (type(begun), progress.open, progress.fraction) == (StartEvent, 1, 0.0)
    assert (type(ended), ended.span_id) == (CompleteEvent, begun.span_id)
    assert begun.time is not None
    assert ended.time is not None
    assert begun.time < ended.time


async def test_a_step_of_an_agent_that_was_killed_does_not_stay_open(running: Running) -> None:
    rollout = running.rollout
    options = StreamOptions(rollout_ids=[rollout.rollout_id])

    async with stream_events(running.store, options=options) as stream:
        with agl.operation(name="search"):
            events = list(await asyncio.wait_for(anext(stream), PATIENCE_SECONDS))
            await running.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
            events += [event async for batch in stream for event in batch]

    assert [type(event) for event in events] == [StartEvent, ErrorEvent]
    assert list(await running.store.query_open_spans(rollout.rollout_id)) == []
    assert by_task(events)[rollout.rollout_id].progress.open == 0


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_number_of_an_emitted_span_is_that_of_the_store(kind: str, tmp_path: Path) -> None:
    memory = kind == "memory"
    store: Any = agl.InMemoryLightningStore() if memory else agl.SqliteLightningStore(tmp_path / "runs.db")
    rollout = await store.start_rollout("task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}

    with agl.OtelTracer(instrument=False).lifespan() as tracer:
        async with tracer.trace_context(store=store, **ids):
            agl.emit_message("hello")
            emitted = agl.emit_reward(1.0)
            number = emitted.sequence_id

    stored = await store.query_spans(rollout.rollout_id)
    await store.close()
    assert number == 2
    assert [(span.name, span.sequence_id) for span in stored] == [
        ("agentlightning.message", 1),
        ("agentlightning.reward", number),
    ]


def test_a_span_that_is_emitted_outside_of_all_rollouts_names_none() -> None:
    span = agl.emit_reward(1.0, propagate=False)

    assert (span.rollout_id, span.attempt_id, span.sequence_id) == (None, None, None)


async def test_a_time_or_a_path_can_be_an_annotation(running: Running) -> None:
    noon = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)

    span = agl.emit_annotation({"at": noon, "path": Path("a/b"), "deep": {"at": noon}})

    assert span is not None
    assert dict(span.attributes or {}) == {
        "at": "2026-01-02T12:00:00+00:00",
        "path": "a/b",
        "deep.at": "2026-01-02T12:00:00+00:00",
    }


def test_an_event_of_ones_own_does_not_look_like_a_framework() -> None:
    assert detect_framework([span_of(BinaryReward(value=1.0, agent="judge"))]) is Framework.OTHER


@agl.rollout
def rewarded_agent(task: str, prompt_template: agl.PromptTemplate) -> float:
    return 0.5


@agl.algo
async def one_round(*, store: agl.LightningStore) -> None:
    await store.add_resources({"prompt": agl.PromptTemplate(template="{question}", engine="f-string")})
    rollout = await store.enqueue_rollout("task", mode="train")
    await store.wait_for_rollouts([rollout.rollout_id])


def test_debug_shows_what_happens_in_a_round(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "agentlightning")

    agl.Trainer(algorithm=one_round, n_runners=1, strategy="shm", progress="off").fit(rewarded_agent)

    words = ["published", "enqueued", "claimed", "the agent starts", "rewarded with 0.5", "finished: succeeded"]
    messages = [record.getMessage() for record in caplog.records]
    assert [word for message in messages for word in words if word in message] == words
