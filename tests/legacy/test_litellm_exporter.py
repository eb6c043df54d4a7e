"""Spans of a LiteLLM proxy: put together by call, stored under the attempt that their headers name."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from agentlightning.legacy.litellm_exporter import HEADERS_ATTRIBUTE, LightningSpanExporter
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout


def context(number: int) -> SpanContext:
    return SpanContext(trace_id=7, span_id=number, is_remote=False, trace_flags=TraceFlags(1))


def span(number: int, parent: int | None = None, headers: Any = None) -> ReadableSpan:
    return ReadableSpan(
        name=f"span-{number}",
        context=context(number),
        parent=None if parent is None else context(parent),
        attributes={} if headers is None else {HEADERS_ATTRIBUTE: str(headers)},
        start_time=1,
        end_time=2,
    )


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
def rollout(store: InMemoryLightningStore) -> AttemptedRollout:
    return asyncio.run(store.start_rollout("task"))


@pytest.fixture
def exporter(store: InMemoryLightningStore) -> Iterator[LightningSpanExporter]:
    made = LightningSpanExporter(store)
    yield made
    made.shutdown()


def stored(store: InMemoryLightningStore, rollout: AttemptedRollout) -> list[tuple[str, int]]:
    spans = asyncio.run(store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))
    return sorted((span.name, span.sequence_id) for span in spans)


def headers_of(rollout: AttemptedRollout, number: str = "5") -> list[dict[str, str]]:
    """In two parts, as several spans of a call may note them."""
    return [
        {"x-rollout-id": rollout.rollout_id},
        {"x-attempt-id": rollout.attempt.attempt_id, "x-sequence-id": number, "x": "y"},
    ]


def test_call_is_stored_when_its_root_has_come(exporter: Any, store: Any, rollout: AttemptedRollout) -> None:
    first, second = headers_of(rollout)

    assert exporter.export([span(3, parent=2, headers=first), span(2, parent=1)]) is SpanExportResult.SUCCESS
    assert stored(store, rollout) == []
    assert exporter.export([span(1, headers=second), span(9, parent=8)]) is SpanExportResult.SUCCESS

    assert stored(store, rollout) == [("span-1", 5), ("span-2", 5), ("span-3", 5)]
    assert [waiting.name for waiting in exporter._buffer] == ["span-9"]


@pytest.mark.parametrize(
    "headers",
    [None, "{", "[1]", {"x-rollout-id": "r"}, {"x-rollout-id": "r", "x-attempt-id": "a", "x-sequence-id": "-1"}],
)
def test_call_that_cannot_be_placed_is_dropped_and_told(
    exporter: LightningSpanExporter, headers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert exporter.export([span(1, headers=headers), span(2, 1)]) is SpanExportResult.SUCCESS

    assert exporter._buffer == []
    assert "dropped" in caplog.text


def test_store_that_refuses_is_a_failure(exporter: LightningSpanExporter) -> None:
    headers = {"x-rollout-id": "ro-unknown", "x-attempt-id": "at-unknown", "x-sequence-id": "1"}

    assert exporter.export([span(1, headers=headers)]) is SpanExportResult.FAILURE
