"""LightningSpanProcessor, as programs of the 0.2 release know it."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Tracer

from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracer.agentops import LightningSpanProcessor


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
def processor() -> Iterator[LightningSpanProcessor]:
    processor = LightningSpanProcessor()
    yield processor
    processor.shutdown()


@pytest.fixture
def otel(processor: LightningSpanProcessor) -> Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("tests")


def test_a_span_is_stored_before_its_end_returns(
    processor: LightningSpanProcessor, otel: Tracer, store: InMemoryLightningStore
) -> None:
    rollout = asyncio.run(store.start_rollout("task"))

    with processor.with_context(
        store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
    ) as bound:
        otel.start_span("one").end()
        stored = asyncio.run(store.query_spans(rollout.rollout_id))

    assert [span.name for span in stored] == ["one"]
    assert bound is processor
    assert [span.name for span in processor.spans()] == ["one"]


def test_spans_are_kept_until_the_next_entry(processor: LightningSpanProcessor, otel: Tracer) -> None:
    with processor:
        otel.start_span("one").end()
    assert len(processor.spans()) == 1

    with processor:
        assert processor.spans() == []


def test_a_store_that_fails_is_logged(
    processor: LightningSpanProcessor, otel: Tracer, caplog: pytest.LogCaptureFixture
) -> None:
    with processor.with_context(store=LightningStore(), rollout_id="ro-1", attempt_id="at-1"):
        otel.start_span("one").end()

    assert len(processor.spans()) == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_span_that_is_not_sampled_is_ignored(processor: LightningSpanProcessor) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(processor)

    provider.get_tracer("tests").start_span("one").end()
    processor.on_end(ReadableSpan("two"))

    assert processor.spans() == []


def test_after_shutdown_spans_are_kept_and_a_store_is_not_reached(
    processor: LightningSpanProcessor, otel: Tracer, store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    processor.shutdown()
    processor.shutdown()

    with processor.with_context(store=store, rollout_id="ro-1", attempt_id="at-1"):
        otel.start_span("one").end()

    assert processor.force_flush()
    assert len(processor.spans()) == 1
    assert "could not be stored" in caplog.text


def test_a_span_that_ends_in_the_private_loop_is_stored_without_waiting(
    processor: LightningSpanProcessor, otel: Tracer
) -> None:
    class Tracing(InMemoryLightningStore):
        async def add_otel_span(self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan) -> None:  # type: ignore[override]
            await super().add_otel_span(rollout_id, attempt_id, readable_span)
            if readable_span.name == "outer":
                otel.start_span("inner").end()

    store = Tracing()
    rollout = asyncio.run(store.start_rollout("task"))

    with processor.with_context(store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        otel.start_span("outer").end()

    assert sorted(span.name for span in processor.spans()) == ["inner", "outer"]
