"""The recorder: every call reaches the store, or is counted with the reason why it did not."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from agentlightning.errors import StoreUnavailable
from agentlightning.llm_proxy.recorder import (
    CALL_LIMITS,
    MOST_REASONS,
    CallCounts,
    CallRecord,
    Origin,
    PendingCall,
    Recorder,
)
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer.shipper import ShipperLimits
from agentlightning.types import AttemptedRollout, Span
from tests.llm_proxy.accounts import calls, record

QUICK = {"close_seconds": 0.2}


def origin_of(rollout: AttemptedRollout) -> Origin:
    return Origin(rollout.rollout_id, rollout.attempt.attempt_id)


def limited(**limits: Any) -> ShipperLimits:
    return replace(CALL_LIMITS, **limits)


class MoodyStore(InMemoryLightningStore):
    """A memory store whose writes can be made to fail, or to take their time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.error: Callable[[Sequence[Span]], Exception | None] = lambda _: None
        self.seconds = 0.0
        self.batches: list[int] = []

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span | None]:
        await self._answer(spans)
        self.batches.append(len(spans))
        return await super().add_many_spans(spans)

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        await self._answer(())
        return await super().get_many_span_sequence_ids(rollout_attempt_ids)

    async def _answer(self, spans: Sequence[Span]) -> None:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        error = self.error(spans)
        if error is not None:
            raise error

    def fall(self, error: Exception | None = None) -> None:
        raised = error or StoreUnavailable("The store is down.")
        self.error = lambda _: raised

    def rise(self) -> None:
        self.error = lambda _: None


@pytest.fixture
def store() -> MoodyStore:
    return MoodyStore()


@pytest.fixture
async def rollout(store: MoodyStore) -> AttemptedRollout:
    return await store.start_rollout("task")


@asynccontextmanager
async def running(store: MoodyStore, **options: Any) -> AsyncIterator[Recorder]:
    recorder = Recorder(store, **options)
    async with recorder.running():
        yield recorder


def finished(recorder: Recorder, call: CallRecord) -> PendingCall:
    """A call that comes and is over."""
    recorder.begin(call.origin)
    return recorder.finish(call)


def counts(of: CallCounts) -> tuple[int, int, int, int]:
    return of.in_flight, of.waiting, of.stored, sum(of.lost.values())


# ---------------------------------------------------------------------- storing


async def test_calls_are_stored_in_batches_and_numbered_by_the_store(
    store: MoodyStore, rollout: AttemptedRollout
) -> None:
    async with running(store) as recorder:
        for number in range(250):
            finished(recorder, record(rollout, number))
        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 250, 0)
    spans = await store.query_spans(rollout.rollout_id)
    assert [(span.name, span.sequence_id) for span in spans] == [("litellm_request", n + 1) for n in range(250)]
    assert store.batches == [100, 100, 50]


async def test_raw_spans_have_the_number_of_their_call(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store, raw_spans=True) as recorder:
        for number in range(3):
            finished(recorder, record(rollout, number))
        assert await recorder.flush()

    spans = await store.query_spans(rollout.rollout_id)
    assert [(span.name, span.sequence_id) for span in spans] == [
        (name, number) for number in (1, 2, 3) for name in ("litellm_request", "raw_gen_ai_request")
    ]


async def test_a_raw_span_that_is_too_large_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    store = MoodyStore(max_span_bytes=20_000)
    rollout = await store.start_rollout("task")
    large = record(rollout, 2, request=b'{"padding":"' + b"x" * 20_000 + b'"}')
    async with running(store, raw_spans=True) as recorder:
        for call in (record(rollout, 1), large, record(rollout, 3)):
            finished(recorder, call)
        assert await recorder.flush()

    spans = await store.query_spans(rollout.rollout_id)
    assert [span.sequence_id for span in spans if span.name == "litellm_request"] == [1, 2, 3]
    assert [span.sequence_id for span in spans if span.name == "raw_gen_ai_request"] == [1, 3]
    assert not recorder.totals.lost
    assert "is recorded without its raw span: Span 'raw_gen_ai_request' takes" in caplog.text


async def test_whoever_waits_for_a_call_finds_it_in_the_store(store: MoodyStore, rollout: AttemptedRollout) -> None:
    store.seconds = 0.02
    async with running(store) as recorder:
        assert await recorder.wait_stored(finished(recorder, record(rollout, 1)))
        assert len(await calls(store, rollout)) == 1
        assert not await recorder.wait_stored(finished(recorder, record(None, 1)))  # the store refuses it


async def test_a_store_that_is_away_is_waited_for_once(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store, limits=limited(patience_seconds=0.05)) as recorder:
        store.fall()
        assert recorder.will_record
        assert not await recorder.wait_stored(finished(recorder, record(rollout, 1)))

        assert not recorder.will_record
        waiting = record(rollout, 2, sent_json={"a": 1}, answer={"b": 2})
        late = finished(recorder, waiting)
        assert (waiting.sent_json, waiting.answer) == (None, None)  # it is kept unread
        with pytest.MonkeyPatch.context() as patched:
            patched.delattr("asyncio.wait")  # which it would wait with
            assert not await recorder.wait_stored(late)

        store.rise()
        assert await recorder.flush()
        assert recorder.will_record


# ---------------------------------------------------------------------- flushing


async def test_flush_waits_for_the_attempt_that_asks(store: MoodyStore, rollout: AttemptedRollout) -> None:
    other = await store.start_rollout("other")
    async with running(store) as recorder:
        store.seconds = 0.05
        finished(recorder, record(rollout, 1))
        assert await recorder.flush(origin_of(other))
        assert recorder.totals.waiting == 1

        assert await recorder.flush(origin_of(rollout))

        assert counts(recorder.counts_of(origin_of(rollout))) == (0, 0, 1, 0)
    assert len(recorder._counts) == 1  # nobody is remembered for asking


async def test_flush_waits_a_little_for_a_call_in_flight(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store) as recorder:
        call = record(rollout, 1)
        recorder.begin(call.origin)
        assert await recorder.flush(grace=0.02)
        assert recorder.totals.in_flight == 1
        asyncio.get_running_loop().call_later(0.05, recorder.finish, call)

        assert await recorder.flush(call.origin, grace=5.0)

        assert counts(recorder.counts_of(call.origin)) == (0, 0, 1, 0)


# ---------------------------------------------------------------------- refusals


async def test_calls_of_a_rollout_that_the_store_does_not_know_are_counted(
    store: MoodyStore, rollout: AttemptedRollout
) -> None:
    stranger = Origin("ro-unknown", "at-unknown")
    async with running(store) as recorder:
        for number in range(6):
            finished(recorder, record(rollout, number, **({"origin": stranger} if number % 2 else {})))
        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 3, 3)
        assert sum(recorder.counts_of(stranger).lost.values()) == 3
        assert list(recorder.totals.lost) == ["NotFound"]


async def test_store_that_breaks_loses_calls_and_is_asked_again(store: MoodyStore, rollout: AttemptedRollout) -> None:
    store.fall(RuntimeError("a bug"))
    async with running(store) as recorder:
        finished(recorder, record(rollout, 1))
        assert await recorder.flush()
        assert recorder.totals.lost == {"RuntimeError": 1}
        store.rise()
        finished(recorder, record(rollout, 2))
        assert await recorder.flush()
    assert len(await calls(store, rollout)) == 1


# ---------------------------------------------------------------------- bounds


async def test_calls_beyond_the_limit_are_lost(
    store: MoodyStore, rollout: AttemptedRollout, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(store, limits=limited(queued_items=10), close_seconds=0.1) as recorder:
        store.fall()
        for number in range(25):
            finished(recorder, record(rollout, number))

        assert counts(recorder.totals) == (0, 10, 0, 15)
        assert recorder.totals.lost == {"too many calls wait for the store": 15}
    assert counts(recorder.totals) == (0, 0, 0, 25)
    assert "25 model calls are lost" in caplog.text
    assert caplog.text.count("is not recorded") == 1


async def test_counts_of_ended_attempts_are_forgotten_when_there_are_many(
    store: MoodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.llm_proxy.recorder.MOST_ATTEMPTS", 20)
    busy = Origin("busy", "at")
    async with running(store) as recorder:
        recorder.begin(busy)
        for number in range(60):
            finished(recorder, record(None, number, origin=Origin(f"ro-{number}", "at")))
            await recorder.flush(grace=0.0)

        assert len(recorder._counts) <= 20
        assert recorder.counts_of(busy).in_flight == 1
        assert recorder.totals.lost == {"NotFound": 60}


def test_reasons_that_are_all_different_are_not_all_kept() -> None:
    counted = CallCounts()
    for number in range(100):
        counted.lose(f"reason {number}")

    assert len(counted.lost) == MOST_REASONS + 1
    assert sum(counted.lost.values()) == 100
