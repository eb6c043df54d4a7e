"""The recorder: every call reaches the store, or is counted with the reason why it did not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import InvalidValue, StoreUnavailable
from agentlightning.llm_proxy.journal import Journal
from agentlightning.llm_proxy.ledgers import MOST_REASONS, AttemptLedger, Ledgers
from agentlightning.llm_proxy.recorder import Recorder, RecorderLimits
from agentlightning.llm_proxy.records import CallRecord, Origin
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Span
from tests.llm_proxy.accounts import calls, record

QUICK = RecorderLimits(close_seconds=0.2)


class MoodyStore(InMemoryLightningStore):
    """A memory store whose writes can be made to fail, or to take their time."""

    def __init__(self) -> None:
        super().__init__()
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
        told = error or StoreUnavailable("The store is down.")
        self.error = lambda _: told

    def rise(self) -> None:
        self.error = lambda _: None


@pytest.fixture
def store() -> MoodyStore:
    return MoodyStore()


@pytest.fixture
async def rollout(store: MoodyStore) -> AttemptedRollout:
    return await store.start_rollout("task")


@asynccontextmanager
async def running(store: MoodyStore, journal: Path | None = None, **options: Any) -> AsyncIterator[Recorder]:
    recorder = Recorder(store, None if journal is None else Journal(journal), **options)
    async with recorder.running():
        recorder.recover()
        yield recorder


def do(recorder: Recorder, call: CallRecord) -> CallRecord:
    """A call that comes and is answered."""
    recorder.begin(call)
    recorder.finish(call)
    return call


def counts(ledger: AttemptLedger) -> tuple[int, int, int, int]:
    return ledger.in_flight, ledger.waiting, ledger.stored, sum(ledger.lost.values())


# ---------------------------------------------------------------------- storing


async def test_calls_are_stored_once_each_with_both_spans_under_one_number(
    store: MoodyStore, rollout: AttemptedRollout
) -> None:
    async with running(store) as recorder:
        for number in range(250):
            do(recorder, record(rollout, number))

        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 250, 0)
    both = [await calls(store, rollout, name) for name in ("litellm_request", "raw_gen_ai_request")]
    assert [len(spans) for spans in both] == [250, 250]
    assert [span.sequence_id for span in both[0]] == [span.sequence_id for span in both[1]]
    assert len({span.sequence_id for span in both[0]}) == 250
    assert max(store.batches) == 200


async def test_call_is_numbered_while_the_model_works(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store) as recorder:
        early = record(rollout, 1)
        recorder.begin(early)
        await until(lambda: early.sequence_id is not None)
        later = await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id)
        recorder.finish(early)

    assert early.sequence_id is not None
    assert early.sequence_id < later
    (span,) = await calls(store, rollout)
    assert span.sequence_id == early.sequence_id


async def test_large_calls_go_in_small_batches(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store, limits=RecorderLimits(batch_bytes=5000)) as recorder:
        for number in range(6):
            do(recorder, record(rollout, number, request=b'{"model":"%s"}' % (b"m" * 3000)))
        assert await recorder.flush()

    assert store.batches == [4, 4, 4]


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "It did not happen in time."
        await asyncio.sleep(0.002)


# ---------------------------------------------------------------------- flushing


async def test_flush_waits_for_the_attempt_that_asks(store: MoodyStore, rollout: AttemptedRollout) -> None:
    other = await store.start_rollout("other")
    async with running(store) as recorder:
        store.seconds = 0.05
        do(recorder, record(rollout, 1))
        assert await recorder.flush(Origin(other.rollout_id, other.attempt.attempt_id))
        assert recorder.totals.waiting == 1

        assert await recorder.flush(Origin(rollout.rollout_id, rollout.attempt.attempt_id))

        assert counts(recorder.report(Origin(rollout.rollout_id, rollout.attempt.attempt_id))) == (0, 0, 1, 0)
    assert len(recorder._ledgers) == 1  # nobody is remembered for asking


async def test_flush_waits_a_little_for_a_call_under_way(store: MoodyStore, rollout: AttemptedRollout) -> None:
    origin = Origin(rollout.rollout_id, rollout.attempt.attempt_id)
    async with running(store) as recorder:
        call = record(rollout, 1)
        recorder.begin(call)
        asyncio.get_running_loop().call_later(0.05, recorder.finish, call)

        assert await recorder.flush(origin, grace=5.0)

        assert counts(recorder.report(origin)) == (0, 0, 1, 0)


async def test_flush_does_not_wait_for_ever_for_a_call_under_way(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store) as recorder:
        call = record(rollout, 1)
        recorder.begin(call)

        assert await recorder.flush(grace=0.02)

        assert recorder.totals.in_flight == 1
        recorder.finish(call)


async def test_flush_gives_up_after_its_time(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store, limits=QUICK) as recorder:
        store.fall()
        do(recorder, record(rollout, 1))

        assert not await recorder.flush(timeout=0.05)
        assert recorder._settled == []
        store.rise()
        assert await recorder.flush()


# ---------------------------------------------------------------------- outages


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("down"), ConnectionResetError("gone"), asyncio.TimeoutError()],
    ids=lambda e: type(e).__name__,
)
async def test_calls_wait_while_the_store_is_away(
    store: MoodyStore, rollout: AttemptedRollout, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(store) as recorder:
        store.fall(error)
        for number in range(150):
            do(recorder, record(rollout, number))
        await until(lambda: "cannot be reached" in caplog.text)
        store.rise()

        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 150, 0)
    assert len(await calls(store, rollout)) == 150
    assert caplog.text.count("cannot be reached") == 1


async def test_calls_wait_for_a_slow_store(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store, limits=RecorderLimits(batch_calls=10)) as recorder:
        store.seconds = 0.02
        for number in range(60):
            do(recorder, record(rollout, number))

        assert await recorder.flush()

    assert len(await calls(store, rollout)) == 60


async def test_outage_in_the_middle_of_a_batch_makes_no_second_copy(
    store: MoodyStore, rollout: AttemptedRollout
) -> None:
    writes = iter([InvalidValue("one of these"), None, None, StoreUnavailable("down"), *[None] * 100])
    async with running(store) as recorder:
        store.error = lambda spans: next(writes) if spans else None
        for number in range(5):
            do(recorder, record(rollout, number))

        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 5, 0)
    assert len(await calls(store, rollout)) == 5


# ---------------------------------------------------------------------- refusals


async def test_refused_call_takes_no_other_with_it(
    store: MoodyStore, rollout: AttemptedRollout, caplog: pytest.LogCaptureFixture
) -> None:
    bad = record(rollout, 7).span_id
    refuse = InvalidValue("not this one")
    store.error = lambda spans: refuse if bad in [span.span_id for span in spans] else None
    async with running(store) as recorder:
        for number in range(20):
            do(recorder, record(rollout, number))

        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 19, 1)
        told = recorder.report(Origin(rollout.rollout_id, rollout.attempt.attempt_id)).lost
    assert told == {"InvalidValue: not this one": 1}
    assert len(await calls(store, rollout)) == 19
    assert "is not recorded (InvalidValue: not this one)" in caplog.text


async def test_calls_of_a_rollout_that_the_store_does_not_know_are_counted(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path
) -> None:
    stranger = Origin("ro-unknown", "at-unknown")
    async with running(store, tmp_path) as recorder:
        for number in range(6):
            do(recorder, record(rollout, number, **({"origin": stranger} if number % 2 else {})))

        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 3, 3)
        assert sum(recorder.report(stranger).lost.values()) == 3
        assert list(recorder.totals.lost) == ["NotFound"]
    assert list(tmp_path.iterdir()) == []


async def test_store_that_breaks_loses_calls_in_memory_and_keeps_them_in_the_journal(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path
) -> None:
    async with running(store, tmp_path) as recorder:
        store.fall(RuntimeError("a bug"))
        do(recorder, record(rollout, 1))
        assert await recorder.flush()
        assert recorder.totals.lost == {"RuntimeError": 1}
        store.rise()
        do(recorder, record(rollout, 2))  # it goes on
        assert await recorder.flush()

    async with running(store, tmp_path) as recorder:
        assert await recorder.flush()
    assert len(await calls(store, rollout)) == 2


# ---------------------------------------------------------------------- bounds


async def test_calls_beyond_the_limit_are_lost_and_told_without_a_journal(
    store: MoodyStore, rollout: AttemptedRollout, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(store, limits=RecorderLimits(waiting_calls=10, close_seconds=0.1)) as recorder:
        store.fall()
        for number in range(25):
            do(recorder, record(rollout, number))

        assert counts(recorder.totals) == (0, 10, 0, 15)
        assert recorder.totals.lost == {"too many calls wait for the store": 15}
        assert len(recorder._to_store) == 10
    assert counts(recorder.totals) == (0, 0, 0, 25)
    assert "25 model calls are lost" in caplog.text
    assert caplog.text.count("is not recorded") == 1


async def test_calls_beyond_the_limit_wait_in_the_journal(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path
) -> None:
    async with running(store, tmp_path, limits=RecorderLimits(waiting_calls=10, batch_calls=7)) as recorder:
        store.fall()
        for number in range(50):
            do(recorder, record(rollout, number))
        assert len(recorder._to_store) == 10
        store.rise()

        assert await recorder.flush()

        assert counts(recorder.totals) == (0, 0, 50, 0)
        assert recorder._waiting_bytes == 0
    assert len(await calls(store, rollout)) == 50
    assert list(tmp_path.iterdir()) == []


async def test_calls_that_wait_are_kept_unread(store: MoodyStore, rollout: AttemptedRollout) -> None:
    async with running(store, limits=RecorderLimits(batch_calls=2)) as recorder:
        store.fall()
        waiting = [do(recorder, record(rollout, number, asked={"a": 1}, answer={"b": 2})) for number in range(5)]

        assert [call.answer is None for call in waiting] == [False, False, True, True, True]
        store.rise()


def test_ledgers_of_ended_attempts_are_forgotten_when_there_are_many() -> None:
    ledgers = Ledgers(most=20)
    busy = Origin("busy", "at")
    ledgers.begin(busy)
    for number in range(500):
        origin = Origin(f"ro-{number}", "at")
        ledgers.begin(origin)
        ledgers.finish(origin)
        ledgers.lose(origin, f"NotFound: ro-{number}")

    assert len(ledgers) <= 20
    assert ledgers.of(busy).in_flight == 1
    assert ledgers.totals.lost == {"NotFound": 500}


def test_reasons_that_are_all_different_are_not_all_kept() -> None:
    ledger = AttemptLedger()
    for number in range(100):
        ledger.lose(f"reason {number}")

    assert len(ledger.lost) == MOST_REASONS + 1
    assert sum(ledger.lost.values()) == 100


# ---------------------------------------------------------------------- journal


async def test_stop_while_the_store_is_down_leaves_the_calls_to_the_next_start(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(store, tmp_path, limits=QUICK) as recorder:
        store.fall()
        for number in range(30):
            do(recorder, record(rollout, number))
    assert "30 model calls are not stored yet" in caplog.text
    assert len(await calls(store, rollout)) == 0
    store.rise()

    async with running(store, tmp_path) as recorder:
        assert await recorder.flush(Origin(rollout.rollout_id, rollout.attempt.attempt_id))

        assert counts(recorder.totals) == (0, 0, 30, 0)
    assert len(await calls(store, rollout)) == 30
    assert "30 model calls of an earlier process" in caplog.text
    assert list(tmp_path.iterdir()) == []


async def test_recovery_waits_for_the_store_and_calls_go_on_meanwhile(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path
) -> None:
    journal = Journal(tmp_path)
    for number in range(10):
        journal.write(record(rollout, number))
    journal.close()
    store.fall()
    async with running(store, tmp_path) as recorder:
        do(recorder, record(rollout, 100))
        assert not await recorder.flush(timeout=0.05)
        store.rise()

        assert await recorder.flush()

    assert len(await calls(store, rollout)) == 11


async def test_recovery_that_is_broken_off_goes_on_where_it_was(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path
) -> None:
    journal = Journal(tmp_path)
    for number in range(10):
        journal.write(record(rollout, number))
    journal.close()
    limits = RecorderLimits(batch_calls=4, close_seconds=0.05)
    async with running(store, tmp_path, limits=limits) as recorder:
        store.error = lambda spans: StoreUnavailable("down") if spans and recorder.totals.stored else None
        await until(lambda: recorder.totals.stored == 4)
    store.rise()

    async with running(store, tmp_path) as recorder:
        assert await recorder.flush()

        assert recorder.totals.stored == 6
    assert len(await calls(store, rollout)) == 10


async def test_found_call_whose_store_failed_is_kept_for_the_next_start(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.write(record(rollout, 1))
    journal.close()
    store.fall(RuntimeError("a fault of the store"))
    async with running(store, tmp_path) as recorder:
        assert await recorder.flush()
        assert dict(recorder.totals.lost) == {"RuntimeError": 1}
    assert "found in the journal and stored" not in caplog.text
    store.rise()

    async with running(store, tmp_path) as recorder:
        assert await recorder.flush()

    assert len(await calls(store, rollout)) == 1
    assert list(tmp_path.iterdir()) == []


async def test_call_that_was_stored_before_the_crash_is_not_stored_again(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path
) -> None:
    async with running(store) as recorder:
        do(recorder, record(rollout, 1))
    journal = Journal(tmp_path)
    journal.write(record(rollout, 1))
    journal.close()

    async with running(store, tmp_path) as recorder:
        assert await recorder.flush()

    assert len(await calls(store, rollout)) == 1


async def test_disk_that_is_full_costs_no_call_and_is_told_once(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(store, tmp_path) as recorder:
        assert recorder.journal is not None

        def refuse(call: CallRecord) -> None:
            raise OSError("No space left on device")

        recorder.journal.write = refuse  # type: ignore[method-assign] # a disk cannot be filled here
        for number in range(10):
            do(recorder, record(rollout, number))
        assert await recorder.flush()

    assert len(await calls(store, rollout)) == 10
    assert caplog.text.count("No space left on device") == 1


async def test_stop_while_disk_and_store_fail_tells_what_is_lost(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(store, tmp_path, limits=QUICK) as recorder:
        assert recorder.journal is not None
        store.fall()
        do(recorder, record(rollout, 1))
        with pytest.MonkeyPatch.context() as full:
            full.setattr("os.pwrite", lambda *_: 0)
            do(recorder, record(rollout, 2))

    assert counts(recorder.totals) == (0, 1, 0, 1)
    assert "1 model calls are lost" in caplog.text
    assert "1 model calls are not stored yet" in caplog.text


async def test_journal_that_cannot_be_read_is_told(
    store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.calls").mkdir()

    async with running(store, tmp_path) as recorder:
        do(recorder, record(rollout, 1))
        assert await recorder.flush()

    assert "cannot be read" in caplog.text
    assert len(await calls(store, rollout)) == 1


async def test_nothing_runs_on_after_the_end(store: MoodyStore, rollout: AttemptedRollout, tmp_path: Path) -> None:
    async with running(store, tmp_path, limits=QUICK) as recorder:
        store.fall()
        do(recorder, record(rollout, 1))

    assert asyncio.all_tasks() == {asyncio.current_task()}
