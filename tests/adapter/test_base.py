"""Adapters are callable, and take spans of either kind."""

from collections.abc import Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning.adapter import Adapter, OtelTraceAdapter, TraceAdapter, TracerTraceToTriplet, TraceToTrajectory
from agentlightning.types import Span


def recorded_call() -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"agentlightning.rollout_id": "ro-7"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    ids = {"prompt_token_ids": [1, 2], "response_token_ids": "[3,4]"}
    with tracer.start_as_current_span("run"), tracer.start_as_current_span("openai.chat.completion", attributes=ids):
        pass
    with tracer.start_as_current_span("agentlightning.reward", attributes={"reward": 0.5}):
        pass
    provider.shutdown()
    return exporter.get_finished_spans()


@pytest.mark.parametrize("kind", [Adapter, TraceAdapter, OtelTraceAdapter])
def test_an_adapter_without_a_rule_says_so(kind: type[Adapter[list[Span], object]]) -> None:
    with pytest.raises(NotImplementedError, match="override its method adapt"):
        kind().adapt([])


def test_spans_of_the_sdk_become_triplets_and_a_trajectory_of_their_rollout() -> None:
    (triplet,) = TracerTraceToTriplet().adapt(recorded_call())
    trajectory = TraceToTrajectory().adapt(recorded_call())

    assert (triplet.prompt, triplet.response) == ({"token_ids": [1, 2]}, {"token_ids": [3, 4]})
    assert triplet.reward == 0.5
    assert trajectory.rollout_id == "ro-7"
    assert trajectory.sequences[0].token_ids == (1, 2, 3, 4)
