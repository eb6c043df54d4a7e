"""Spans reach the store, whatever the store does; the agent does not notice, and no loss goes unsaid."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from agentlightning.errors import StoreUnavailable
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer.binding import Binding, Recorder
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.shipper import ShipperLimits
from agentlightning.tracer.trace_shipper import TraceShipper
from agentlightning.types import AttemptedRollout, Span
from tests.store.test_composed import OldStore
from tests.tracer.conftest import Outage, TroubledStore, refuse_the_bad

SOON = ShipperLimits(linger_seconds=0.01, patience_seconds=0.05)
OTEL = TracerProvider(shutdown_on_exit=False).get_tracer("tests")


def finished(name: str = "step", **attributes: object) -> ReadableSpan:
    span = OTEL.start_span(name, attributes=attributes)  # type: ignore[arg-type] # any value will do
    span.end()
    assert isinstance(span, ReadableSpan)
    return span


class Line:
    """A shipper to a store, and one attempt whose spans it carries."""

    def __init__(self, shipper: TraceShipper, attempted: AttemptedRollout) -> None:
        self.shipper = shipper
        self.binding = self.another(attempted)

    def another(self, attempted: AttemptedRollout) -> Binding:
        ids = (attempted.rollout_id, attempted.attempt.attempt_id)
        return Binding(DummyTracer(), Recorder(), self.shipper, *ids)

    def put(self, *names: str) -> None:
        for name in names:
            self.shipper.put(self.binding, finished(name))

    async def flush(self, timeout: float = 20.0) -> bool:
        return await self.shipper.flush(self.binding, timeout)

    async def stored(self) -> list[str]:
        spans = await self.shipper.store.query_spans(self.binding.rollout_id)
        return [span.name for span in spans]

    @property
    def lost(self) -> dict[str, int]:
        return self.binding.recorder.losses.reasons


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    opened: list[Line] = []
    yield opened
    for line in opened:
        line.shipper.close(timeout=0.0)


async def open_line(lines: list[Line], store: LightningStore, limits: ShipperLimits = SOON) -> Line:
    line = Line(TraceShipper(store, limits), await store.start_rollout("task"))
    lines.append(line)
    return line


async def test_what_gathers_is_stored_in_one_batch(lines: list[Line]) -> None:
    store = TroubledStore(lambda spans: None)
    line = await open_line(lines, store)

    line.put(*["step"] * 100)
    await line.flush()

    assert store.calls == 1


async def test_a_span_that_ended_earlier_gets_the_smaller_number(
    lines: list[Line], store: InMemoryLightningStore
) -> None:
    line = await open_line(lines, store)
    spans = [finished(f"step {number}") for number in range(10)]

    for span in reversed(spans):
        line.shipper.put(line.binding, span)
    await line.flush()

    assert await line.stored() == [span.name for span in spans]


async def test_numbers_asked_for_early_keep_the_order_in_which_the_spans_ended(
    lines: list[Line], store: InMemoryLightningStore
) -> None:
    line = await open_line(lines, store)
    line.shipper.start = lambda: None  # type: ignore[method-assign] # nobody else may take them
    spans = [finished(f"step {number}") for number in range(4)]

    for span in (spans[1], spans[0]):
        line.shipper.put(line.binding, span)
    line.shipper.number_waiting()
    for span in (spans[3], spans[2]):
        line.shipper.put(line.binding, span)
    del line.shipper.start  # type: ignore[method-assign]
    line.shipper.start()
    await line.flush()

    assert await line.stored() == [span.name for span in spans]
    contexts = [span.get_span_context() for span in spans]
    assert [line.binding.recorder.numbers[context.span_id] for context in contexts if context] == [1, 2, 3, 4]


async def test_spans_that_are_withdrawn_keep_the_numbers_they_were_given(
    lines: list[Line], store: InMemoryLightningStore
) -> None:
    line = await open_line(lines, store)
    line.shipper.start = lambda: None  # type: ignore[method-assign] # nobody else may take them
    ids = (line.binding.rollout_id, line.binding.attempt_id)
    await store.get_next_span_sequence_id(*ids)
    line.put("one", "two")
    line.shipper.number_waiting()

    spans = line.shipper.withdraw(line.binding)
    await store.finish_attempt(*ids, "succeeded", spans=spans or ())

    assert [(span.name, span.sequence_id) for span in await store.query_spans(ids[0])] == [("one", 2), ("two", 3)]


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("down"), ConnectionResetError("gone"), asyncio.TimeoutError()],
    ids=lambda error: type(error).__name__,
)
async def test_spans_wait_for_a_store_that_is_down(lines: list[Line], error: Exception) -> None:
    outage = Outage(error)
    line = await open_line(lines, TroubledStore(outage))

    line.put("one", "two")
    asyncio.get_running_loop().call_later(0.1, outage.end)

    assert await line.flush()
    assert await line.stored() == ["one", "two"]
    assert line.lost == {}


async def test_an_outage_is_logged_once(lines: list[Line], caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    store = TroubledStore(outage)
    line = await open_line(lines, store)

    line.put("one")
    asyncio.get_running_loop().call_later(0.2, outage.end)
    await line.flush()

    assert store.calls > 2
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "Spans wait because the store cannot take them: StoreUnavailable: The store is down.; trying again."
    ]


async def test_what_a_store_does_not_take_in_time_is_counted_as_lost(lines: list[Line]) -> None:
    line = await open_line(lines, TroubledStore(Outage()))
    line.put("one", "two")
    assert not await line.flush(timeout=0.1)
    assert line.lost == {"the store did not take it within 0.1 s of the end of its trace": 2}


async def test_one_refused_span_does_not_take_others_with_it(lines: list[Line]) -> None:
    line = await open_line(lines, TroubledStore(refuse_the_bad))

    line.put("one", "bad", "two", "three", "bad")
    await line.flush()

    assert await line.stored() == ["one", "two", "three"]
    assert line.lost == {"the store refused it: InvalidValue: A span is called 'bad'.": 2}


async def test_a_store_that_is_broken_loses_spans_instead_of_holding_up_others(lines: list[Line]) -> None:
    def break_on_the_bad(spans: Sequence[Span]) -> None:
        if any(span.name == "bad" for span in spans):
            raise RuntimeError("a bug")

    line = await open_line(lines, TroubledStore(break_on_the_bad))

    line.put("one", "bad", "two")
    await line.flush()

    assert await line.stored() == ["one", "two"]
    assert line.lost == {"the store refused it: RuntimeError: a bug": 1}


async def test_spans_of_an_unknown_rollout_are_lost_and_say_so(
    lines: list[Line], store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    line = await open_line(lines, store)
    stray = Binding(DummyTracer(), Recorder(), line.shipper, "ro-none", "at-none")

    line.put("one")
    for _ in range(3):
        line.shipper.put(stray, finished("stray"))
    await line.shipper.flush(stray)

    assert await line.stored() == ["one"]
    assert stray.recorder.losses.count == 3
    assert len([record for record in caplog.records if "ro-none" in record.message]) == 1


async def test_an_agent_waits_once_for_room_and_then_loses_at_once(lines: list[Line]) -> None:
    limits = ShipperLimits(queued_items=10, batch_items=5, linger_seconds=0.01, patience_seconds=0.05)
    line = await open_line(lines, TroubledStore(Outage()), limits)
    began = time.perf_counter()

    line.put(*["step"] * 200)

    assert time.perf_counter() - began < 5.0  # 190 times the patience are 9.5
    assert line.lost["the queue was full"] >= 180
    assert len(line.shipper._queue) <= 10


async def test_the_queue_is_bounded_by_bytes_too(lines: list[Line]) -> None:
    limits = ShipperLimits(queued_bytes=50_000, linger_seconds=0.01, patience_seconds=0.0)
    line = await open_line(lines, TroubledStore(Outage()), limits)

    for _ in range(20):
        line.shipper.put(line.binding, finished("long", text="x" * 20_000))

    assert line.lost["the queue was full"] >= 15


async def test_a_slow_store_does_not_slow_the_agent(lines: list[Line]) -> None:
    release = threading.Event()

    async def slowly() -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)

    line = await open_line(lines, TroubledStore(lambda spans: slowly()))
    began = time.perf_counter()

    line.put(*["step"] * 100)

    assert time.perf_counter() - began < 10.0  # the store does not go on before this
    release.set()
    assert await line.flush()
    assert len(await line.stored()) == 100


async def test_a_batch_whose_answer_was_lost_is_not_stored_twice(lines: list[Line]) -> None:
    class Forgetful(InMemoryLightningStore):
        calls = 0

        async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span | None]:
            stored = await super().add_many_spans(spans)
            self.calls += 1
            if self.calls == 1:
                raise ConnectionResetError("gone")
            return stored

    store = Forgetful()
    line = await open_line(lines, store)

    line.put("one", "two")
    await line.flush()

    spans = await store.query_spans(line.binding.rollout_id)
    assert [(span.name, span.sequence_id) for span in spans] == [("one", 1), ("two", 2)]
    assert (store.calls, line.lost) == (2, {})


async def test_a_store_without_batches_gets_spans_one_by_one(lines: list[Line]) -> None:
    store = OldStore()
    shipper = TraceShipper(store, SOON)
    rollout = await store.start_rollout("task")
    binding = Binding(DummyTracer(), Recorder(), shipper, rollout.rollout_id, rollout.attempt.attempt_id)

    shipper.put(binding, finished("one"))
    shipper.put(binding, finished("two"))
    await shipper.flush(binding)
    shipper.close()

    spans = await store.query_spans(rollout.rollout_id)
    assert [(span.name, span.sequence_id) for span in spans] == [("one", 1), ("two", 2)]


async def test_closing_delivers_what_is_left_and_ends_the_thread(
    lines: list[Line], store: InMemoryLightningStore
) -> None:
    line = await open_line(lines, store)
    line.put("one")

    line.shipper.close()
    line.put("late")

    assert await line.stored() == ["one"]
    assert line.lost == {"it ended after its trace was closed": 1}
    assert line.shipper._thread is None


async def test_a_trace_that_was_given_up_does_not_hold_up_others(lines: list[Line]) -> None:
    outage = Outage()
    line = await open_line(lines, TroubledStore(outage))
    other = line.another(await line.shipper.store.start_rollout("other"))
    line.put("lost")
    line.shipper.put(other, finished("kept"))

    await line.flush(timeout=0.05)
    outage.end()
    await line.shipper.flush(other)

    assert await line.stored() == []
    assert [span.name for span in await line.shipper.store.query_spans(other.rollout_id)] == ["kept"]


async def test_a_full_queue_takes_spans_again_when_the_store_is_back(lines: list[Line]) -> None:
    outage = Outage()
    limits = ShipperLimits(queued_items=10, linger_seconds=0.01, patience_seconds=0.0)
    line = await open_line(lines, TroubledStore(outage), limits)
    line.put(*["early"] * 30)

    outage.end()
    await line.flush()
    line.put("late")
    await line.flush()

    assert (await line.stored())[-1] == "late"


async def test_closing_never_hangs_however_busy_the_loop_is(store: InMemoryLightningStore) -> None:
    for _ in range(20):
        shipper = TraceShipper(store, SOON)
        line = Line(shipper, await store.start_rollout("task"))
        line.put("one")
        await line.flush()
        shipper.close()
        assert await line.stored() == ["one"]
