"""Finished spans of traces on their way to the store, and those that have begun and stay open for a while.

Most spans end before anybody could look, and the store never sees those twice. A span is shown to the store before its
end if it is open at two looks in a row, which are at least a linger apart. If that fails, the finished span comes all
the same.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry import trace

from agentlightning.instrumentation.model_calls import RECORDED_AS, without_recorded_content
from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour.open_spans import outline_of
from agentlightning.tracer.binding import Binding
from agentlightning.tracer.conversion import SpanConverter, attributes_behind, events_behind
from agentlightning.tracer.shipper import PendingItem
from agentlightning.types import Span, TraceStatus
from agentlightning.types.tracer import convert_timestamp

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace import Span as LiveSpan

__all__ = ["OpenSpans", "PendingSpan"]

logger = logging.getLogger(__name__)

BARE_SPAN_BYTES: Final = 1000
"""About what a span takes that has no attributes."""
ITEM_BYTES: Final = 40
"""About what an attribute, or an item of a list, takes besides its text."""
MOST_BEGUN: Final = 10_000
"""Spans between two looks; of more, the oldest are not shown."""

_Begun = tuple[Binding, "LiveSpan"]


class PendingSpan(PendingItem):
    """One finished span and the trace it belongs to."""

    __slots__ = ("binding", "converter", "sequence_id", "span")

    def __init__(self, binding: Binding, span: "ReadableSpan", converter: SpanConverter) -> None:
        self.weight = _weigh(span)  # without super(): every span of an agent passes here
        self.is_settled = False
        self.binding = binding
        self.span = span
        self.converter = converter
        self.sequence_id = 0
        """0 until it is numbered."""

    @property
    def owner(self) -> Binding:
        return self.binding

    @property
    def ended(self) -> float:
        return self.span.end_time or 0

    def make_spans(self) -> list[Span]:
        binding = self.binding
        span = self.converter.convert(self.span, binding.rollout_id, binding.attempt_id, self.sequence_id)
        return [without_recorded_content(span) if RECORDED_AS in span.attributes else span]

    def number(self, sequence_id: int) -> None:
        """Give it its final number; its trace remembers it."""
        self.sequence_id = sequence_id
        context = self.span.get_span_context()
        if context is not None:
            self.binding.recorder.numbers[context.span_id] = sequence_id

    def store(self, stored: Sequence[Span | None]) -> None:
        self.is_settled = True
        if not self.sequence_id and stored and stored[0] is not None:
            self.number(stored[0].sequence_id)

    def lose(self, reason: str, error: Exception | None = None) -> None:
        if self.is_settled:
            return
        self.is_settled = True
        losses = self.binding.recorder.losses
        losses.add(reason)
        if losses.count == 1:
            logger.warning(
                "Span '%s' of rollout '%s', attempt '%s', is lost (%s); further losses of it are counted only.",
                self.span.name,
                self.binding.rollout_id,
                self.binding.attempt_id,
                reason,
            )


def _weigh(span: "ReadableSpan") -> int:
    """Bytes, roughly: enough to keep long prompts from filling the memory."""
    values = tuple(attributes_behind(span).values())
    weight = BARE_SPAN_BYTES * (1 + len(events_behind(span))) + ITEM_BYTES * len(values)
    weight += sum([len(value) for value in values if type(value) is str])
    for value in values:
        if type(value) is tuple or type(value) is list:
            weight += ITEM_BYTES * len(value) + sum([len(item) for item in value if type(item) is str])
    return weight


class OpenSpans:
    """The spans of one delivery that have begun lately."""

    def __init__(self) -> None:
        self.begun: deque[_Begun] = deque(maxlen=MOST_BEGUN)
        """Appended to by the agents' threads."""
        self._seen: list[_Begun] = []
        self._next_look = 0.0

    @property
    def has_some(self) -> bool:
        """Whether there is something to look at."""
        return bool(self.begun or self._seen)

    async def look(self, store: LightningStore, now: float, linger_seconds: float) -> None:
        """Show those that were open at the last look and still are; too early a look sees nothing."""
        if now < self._next_look:
            return
        self._next_look = now + linger_seconds
        still_open = [_outline(*begun) for begun in self._seen if _is_open(*begun)]
        self._seen = [self.begun.popleft() for _ in range(len(self.begun))]
        if still_open:
            await self._show(store, still_open)

    async def _show(self, store: LightningStore, spans: Sequence[Span]) -> None:
        try:
            await store.add_open_spans(spans)
        except Exception as error:  # noqa: BLE001 # the boundary: whatever a store raises, the finished spans will come
            logger.debug("%d open spans were not shown: %s: %s", len(spans), type(error).__name__, error)


def _is_open(binding: Binding, span: "LiveSpan") -> bool:
    is_sampled = span.get_span_context().trace_flags.sampled
    return span.end_time is None and is_sampled and not binding.recorder.is_given_up


def _outline(binding: Binding, span: "LiveSpan") -> Span:
    context = span.get_span_context()
    return Span.from_attributes(
        attributes=outline_of(dict(attributes_behind(span))),
        rollout_id=binding.rollout_id,
        attempt_id=binding.attempt_id,
        name=span.name,
        trace_id=trace.format_trace_id(context.trace_id),
        span_id=trace.format_span_id(context.span_id),
        parent_id=None if span.parent is None else trace.format_span_id(span.parent.span_id),
        start_time=convert_timestamp(span.start_time),
        status=TraceStatus(status_code="UNSET"),
    )
