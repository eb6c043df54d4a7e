"""What all tests share: a clock they can turn, and spans they can add."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from agentlightning.types import AttemptedRollout, OtelResource, Span, TraceStatus

# The same examples each time: a test that fails must fail again.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands set up the logging of the process; the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in (None, "agentlightning")]
    before = [(logger, logger.level, logger.propagate, logger.disabled, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, propagate, disabled, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        if logger.name == "agentlightning":
            logger.handlers[:] = handlers


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
