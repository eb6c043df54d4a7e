"""What all tests share: a clock they can turn, and spans they can add."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.types import AttemptedRollout, OtelResource, Span, TraceStatus


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


MakeSpan = Callable[..., Span]


@pytest.fixture
def make_span() -> MakeSpan:
    """Builds a span of an attempt; every one has an id of its own."""
    numbers = itertools.count(1)

    def make(rollout: AttemptedRollout, sequence_id: int = 1, **changes: Any) -> Span:
        fields: dict[str, Any] = {
            "rollout_id": rollout.rollout_id,
            "attempt_id": rollout.attempt.attempt_id,
            "sequence_id": sequence_id,
            "trace_id": f"{1:032x}",
            "span_id": f"{next(numbers):016x}",
            "parent_id": None,
            "name": "step",
            "status": TraceStatus(status_code="OK"),
            "attributes": {"text": "hello", "tokens": [1, 2, 3]},
            "events": [],
            "links": [],
            "start_time": 1.0,
            "end_time": 2.0,
            "context": None,
            "parent": None,
            "resource": OtelResource(attributes={}, schema_url=""),
        }
        return Span(**{**fields, **changes})

    return make
