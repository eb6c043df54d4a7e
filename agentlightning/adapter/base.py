"""The shape of an adapter: one object in, another out, nothing remembered in between.

An algorithm asks its adapter for what it wants to learn from and does not care how the spans look. A new adapter is a
subclass of `TraceAdapter` with one method:

    class CountSpans(TraceAdapter[int]):
        def adapt(self, source: Sequence[SpanLike], /) -> int:
            return len(source)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from agentlightning.adapter.call_attributes import with_recorded_content
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.types.tracer import Span, SpanLike

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Adapter", "OtelTraceAdapter", "TraceAdapter", "as_spans"]

T_from = TypeVar("T_from")
T_to = TypeVar("T_to")


class Adapter(Generic[T_from, T_to]):
    """Turns one kind of object into another; calling it is adapting."""

    def __call__(self, source: T_from, /) -> T_to:
        return self.adapt(source)

    def adapt(self, source: T_from, /) -> T_to:
        """The object in its other form; subclasses say how."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to adapt; override its method adapt.")


class OtelTraceAdapter(Adapter[list["ReadableSpan"], T_to], Generic[T_to]):
    """An adapter of spans as the OpenTelemetry SDK records them."""


class TraceAdapter(Adapter[list[Span], T_to], Generic[T_to]):
    """An adapter of spans as the store keeps them."""


def as_spans(source: Sequence[SpanLike]) -> list[Span]:
    """Our spans, whichever kind they were, with the content of their calls; those of the SDK are numbered in order."""
    found: list[Span] = []
    for number, span in enumerate(source, 1):
        if not isinstance(span, Span):  # whose span it is stands in its resource, if anywhere
            names = LightningResourceAttributes.ROLLOUT_ID.value, LightningResourceAttributes.ATTEMPT_ID.value
            rollout_id, attempt_id = (str(span.resource.attributes.get(name, "")) for name in names)
            span = Span.from_opentelemetry(span, rollout_id, attempt_id, number)
        found.append(span)
    return with_recorded_content(found)
