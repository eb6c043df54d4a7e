"""A trace that is open while a test emits."""

from collections.abc import Iterator

import pytest

from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.tracer.binding import Recorder

KINDS = {"otel": OtelTracer, "dummy": DummyTracer}


@pytest.fixture(params=KINDS)
def trace(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """Of every tracer emitters can speak to."""
    with KINDS[request.param]().lifespan() as tracer, tracer._trace_context_sync() as recorder:
        yield recorder
