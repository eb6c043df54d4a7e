"""A tracer that is torn down, and stores that fail in the ways stores do."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from agentlightning.errors import InvalidValue, StoreUnavailable
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Span


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    with OtelTracer(instrument=False).lifespan() as tracer:
        yield tracer


class TroubledStore(InMemoryLightningStore):
    """A store that calls `trouble` before it takes spans."""

    def __init__(self, trouble: Callable[[Sequence[Span]], Any]) -> None:
        super().__init__()
        self.trouble = trouble
        self.calls = 0

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span | None]:
        self.calls += 1
        outcome = self.trouble(spans)
        if asyncio.iscoroutine(outcome):
            await outcome
        return await super().add_many_spans(spans)


def refuse_the_bad(spans: Sequence[Span]) -> None:
    if any(span.name == "bad" for span in spans):
        raise InvalidValue("A span is called 'bad'.")


class Outage:
    """Down until `end` is called."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or StoreUnavailable("The store is down.")
        self.is_down = True

    def __call__(self, spans: Sequence[Span]) -> None:
        if self.is_down:
            raise self.error

    def end(self) -> None:
        self.is_down = False
