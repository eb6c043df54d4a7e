"""Spans that have begun: those that stay open for a while are shown to the store before they end.

Most spans end before anybody could look, and of those the store never hears twice. A span is shown if it is open at two
looks in a row, which are at least a linger apart. Showing is a courtesy: what goes wrong with it is logged, and the
finished span comes all the same.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry import trace

from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour.open_spans import outline_of
from agentlightning.tracer.binding import Binding
from agentlightning.tracer.conversion import attributes_behind
from agentlightning.types import Span, TraceStatus
from agentlightning.types.tracer import convert_timestamp

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span as LiveSpan

__all__ = ["OpenSpans"]

logger = logging.getLogger(__name__)

MOST_BEGUN: Final = 10_000
"""Spans between two looks; of more, the oldest are not shown."""

_Begun = tuple[Binding, "LiveSpan"]


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
