"""Streams of events out of real stores."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigurationError
from agentlightning.events import (
    AgentReply,
    Batch,
    CompleteEvent,
    ErrorEvent,
    EventStream,
    Progress,
    RewardEvent,
    StartEvent,
    StreamOptions,
    by_task,
    of_kind,
    stream_events,
)
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from agentlightning.store.notices import NoticeBoard
from agentlightning.types import AttemptedRollout, Notice, RolloutConfig, Span
from tests.events.conftest import finish, message_span, say

SOON_SECONDS = 20.0
LONG_SECONDS = 3600.0


async def soon(stream: EventStream[Any]) -> Any:
    """The next result, which must come soon."""
    return await asyncio.wait_for(anext(stream), SOON_SECONDS)


def texts_of(*batches: Batch) -> list[str]:
    return [event.text for batch in batches for event in batch if isinstance(event, AgentReply)]


def only(*rollout_ids: str, **changes: Any) -> StreamOptions:
    return StreamOptions(rollout_ids=frozenset(rollout_ids), **changes)


# ---------------------------------------------------------------------- over every store


async def test_stream_of_named_rollouts_ends_with_them(store: LightningStore) -> None:
    first, second = [await store.start_rollout(n) for n in range(2)]
    await say(store, first, "a", "b")
    stream = stream_events(store, mode="batch", options=only(first.rollout_id, second.rollout_id, batch_seconds=0.01))

    async with stream:
        got = [await soon(stream)]
        await say(store, second, "c")
        await finish(store, first)
        await finish(store, second)
        got += [batch async for batch in stream]

    assert sorted(texts_of(*got)) == ["a", "b", "c"]


def step(rollout: AttemptedRollout, span_id: str, end_time: float | None = None, **changes: Any) -> Span:
    """A piece of work; open without an end time."""
    fields: dict[str, Any] = {"name": span_id, "span_id": span_id, "start_time": 1.0, "end_time": end_time}
    owner = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return Span.from_attributes(**{"attributes": {}, **fields, **owner, **changes})


async def test_a_step_is_told_when_it_begins_and_when_it_ends_and_never_twice(store: LightningStore) -> None:
    rollout = await store.start_rollout("task")
    async with stream_events(store, options=only(rollout.rollout_id)) as stream:
        waiting = asyncio.create_task(soon(stream))
        await store.add_open_spans([step(rollout, "work", attributes={"agent.name": "critic"})])
        (begun,) = await waiting
        await store.add_many_spans([step(rollout, "work", 2.0, sequence_id=1, attributes={"agent.name": "critic"})])
        await finish(store, rollout)
        later = [event async for batch in stream for event in batch]

    assert (type(begun), begun.span_id, begun.time, begun.agent) == (StartEvent, "work", 1.0, "critic")
    assert [(type(event), event.span_id, event.time) for event in later] == [(CompleteEvent, "work", 2.0)]
    assert by_task([begun])[rollout.rollout_id].progress == Progress(started=1)
    assert by_task([begun, *later])[rollout.rollout_id].progress == Progress(started=1, completed=1)


async def test_a_step_that_its_attempt_left_unfinished_ends_as_an_error() -> None:
    store, config = InMemoryLightningStore(), RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
    rollout = await store.start_rollout("task", config=config)
    async with stream_events(store, options=only(rollout.rollout_id)) as stream:
        waiting = asyncio.create_task(soon(stream))
        await store.add_open_spans([step(rollout, "work")])
        (begun,) = await waiting
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="unresponsive")
        (ended,) = await soon(stream)

    assert isinstance(ended, ErrorEvent)
    assert (ended.span_id, ended.message) == ("work", "'work' had not ended when its attempt was over.")
    assert by_task([begun, ended])[rollout.rollout_id].progress.open == 0


async def test_a_stream_that_begins_late_is_told_what_is_open() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("task")
    await store.add_open_spans([step(rollout, "work")])

    async with stream_events(store) as stream:
        (begun,) = await soon(stream)

    assert isinstance(begun, StartEvent)


async def test_stream_follows_rollouts_that_are_yet_to_come(store: LightningStore) -> None:
    async with stream_events(store, transform=of_kind("message")) as stream:
        waiting = asyncio.create_task(soon(stream))
        await asyncio.sleep(0)
        rollout = await store.start_rollout("later")
        await say(store, rollout, "hello")

        assert texts_of(await waiting) == ["hello"]


async def test_nothing_is_lost_or_doubled_while_writers_write(store: LightningStore) -> None:
    rollouts = [await store.start_rollout(n) for n in range(4)]

    async def write(number: int) -> None:
        for step in range(15):
            await store.add_span(message_span(rollouts[number], f"{number}-{step}", 1))
        await finish(store, rollouts[number])

    options = only(*(rollout.rollout_id for rollout in rollouts), batch_size=7, batch_seconds=0.01)
    async with stream_events(store, mode="batch", consumers=3, options=options) as stream:
        writing = [asyncio.create_task(write(number)) for number in range(4)]
        got = [batch async for batch in stream]
        await asyncio.gather(*writing)

    texts = texts_of(*got)
    assert sorted(texts) == sorted(f"{number}-{step}" for number in range(4) for step in range(15))
    for number in range(4):
        assert [t for t in texts if t.startswith(f"{number}-")] == [f"{number}-{step}" for step in range(15)]
    assert max(map(len, got)) <= 7


# ---------------------------------------------------------------------- gaps and losses


class Forgetful(InMemoryLightningStore):
    """A store that keeps the last three notices, and counts the gaps it told of."""

    def __init__(self) -> None:
        super().__init__()
        self._board = NoticeBoard(capacity=3)
        self.gaps = 0

    async def subscribe(self, *args: Any, **kwargs: Any) -> AsyncIterator[Notice]:  # type: ignore[override]
        async for notice in super().subscribe(*args, **kwargs):
            self.gaps += notice.kind == "gap"
            yield notice


async def test_stream_resumes_over_a_gap() -> None:
    store = Forgetful()
    rollouts = [await store.start_rollout(n) for n in range(3)]
    options = only(*(rollout.rollout_id for rollout in rollouts), batch_size=1)

    async with stream_events(store, options=options) as stream:
        reading = asyncio.create_task(_all(stream))
        for rollout in rollouts:
            while not store._board.has_waiters:
                await asyncio.sleep(0)
            await store.add_many_spans([message_span(rollout, f"{n}", n) for n in range(40)])
            await finish(store, rollout)
        got = await asyncio.wait_for(reading, SOON_SECONDS)

    assert store.gaps > 0
    assert sorted(texts_of(*got)) == sorted([f"{n}" for n in range(40)] * 3)


async def test_stream_outlives_its_server(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    server = LightningStoreServer(store, "127.0.0.1", 0)
    await server.start()
    client = LightningStoreClient(server.endpoint, retry_delays=(0.05,) * 40, health_retry_delays=(0.05,) * 40)
    rollout = await store.start_rollout("a")
    await say(store, rollout, "before")

    async with stream_events(client, options=only(rollout.rollout_id)) as stream:
        got = [await soon(stream)]
        await server.stop()
        await say(store, rollout, "meanwhile")
        again = LightningStoreServer(store, "127.0.0.1", server.port)
        await again.start()
        await say(store, rollout, "after")
        await finish(store, rollout)
        got += await asyncio.wait_for(_all(stream), SOON_SECONDS)

    assert texts_of(*got) == ["before", "meanwhile", "after"]
    await client.close()
    await again.stop()
    await store.close()


async def _all(stream: EventStream[Any]) -> list[Any]:
    return [result async for result in stream]


async def test_spans_that_were_dropped_are_an_error_event() -> None:
    store = InMemoryLightningStore(eviction_memory_threshold=4000, safe_memory_threshold=2000)
    old = await store.start_rollout("old")
    await say(store, old, "x" * 1000)
    await finish(store, old)
    for number in range(8):
        rollout = await store.start_rollout(number)
        await say(store, rollout, "y" * 1000)

    got = await _all(stream_events(store, options=only(old.rollout_id)))

    ((event,),) = got
    assert isinstance(event, ErrorEvent)
    assert (event.rollout_id, event.error_type) == (old.rollout_id, "SpansEvicted")


# ---------------------------------------------------------------------- modes


async def test_hybrid_does_not_keep_a_reward_waiting() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("a")
    await say(store, rollout, "a")
    options = StreamOptions(batch_size=100, batch_seconds=LONG_SECONDS)

    async with stream_events(store, mode="hybrid", options=options) as stream:
        waiting = asyncio.create_task(soon(stream))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        reward = message_span(rollout, "", 2, name="agentlightning.reward")
        reward.attributes["reward"] = 1.0
        await store.add_span(reward)
        batch = await waiting

    assert done == set()
    assert [type(event) for event in batch[:1]] == [AgentReply]
    assert isinstance(batch[1], RewardEvent)


# ---------------------------------------------------------------------- handlers and ends


async def test_failure_of_a_handler_ends_the_stream_at_its_place() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("a")
    await say(store, rollout, "a", "b", "c")

    async def handle(batch: Batch) -> str:
        (text,) = texts_of(batch)
        if text == "b":
            raise ZeroDivisionError("b")
        return text

    stream = stream_events(store, handle)
    assert await soon(stream) == "a"
    with pytest.raises(ZeroDivisionError):
        await soon(stream)

    assert [result async for result in stream] == []


async def test_failure_of_the_store_is_raised() -> None:
    class Broken(InMemoryLightningStore):
        async def query_spans(self, *args: Any, **kwargs: Any) -> Any:
            raise ConnectionError("gone")

    store = Broken()
    await store.start_rollout("a")

    with pytest.raises(ConnectionError, match="gone"):
        await soon(stream_events(store))


async def test_impatient_reader_loses_nothing() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("a")
    got: list[Batch] = []

    async with stream_events(store) as stream:
        for text in "abcdefgh":
            await say(store, rollout, text)
            with suppress(asyncio.TimeoutError):
                while True:
                    got.append(await asyncio.wait_for(anext(stream), 0.001))
        got += [await soon(stream) for _ in range(8 - len(got))]

    assert texts_of(*got) == list("abcdefgh")


async def test_closing_wakes_the_reader_and_leaves_no_tasks() -> None:
    store = InMemoryLightningStore()
    stream = stream_events(store)
    reading = asyncio.create_task(_all(stream))
    await asyncio.sleep(0.01)

    await stream.aclose()

    assert await asyncio.wait_for(reading, SOON_SECONDS) == []
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("agl-event")]


async def test_slow_reader_stops_the_reading() -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("a")
    await store.add_many_spans([message_span(rollout, str(n), n) for n in range(400)])
    handled: list[Batch] = []

    async def handle(batch: Batch) -> None:
        handled.append(batch)

    async with stream_events(store, handle, consumers=2, options=StreamOptions(batch_size=1)) as stream:
        await soon(stream)
        await asyncio.sleep(0.05)

    assert len(handled) <= 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "sometimes"}, "mode is 'sometimes'"),
        ({"consumers": 0}, "consumers is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_impossible_stream_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        stream_events(InMemoryLightningStore(), **changes) if "batch_size" not in changes else StreamOptions(**changes)
