"""Parcels: finished spans on their way to the store, from OpenTelemetry's form to ours."""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import Binding
from agentlightning.tracer.conversion import SpanConverter, attributes_behind, events_behind
from agentlightning.types import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Parcel", "in_order", "store_parcels"]

logger = logging.getLogger(__name__)

BARE_SPAN_BYTES: Final = 1000
"""About what a span takes that has no attributes."""
ITEM_BYTES: Final = 40
"""About what an attribute, or an item of a list, takes besides its text."""


class Parcel:
    """One span and the trace it belongs to. It is settled once: stored or lost."""

    __slots__ = ("binding", "is_settled", "sequence_id", "span", "stored_as", "weight")

    def __init__(self, binding: Binding, span: "ReadableSpan") -> None:
        self.binding = binding
        self.span = span
        self.weight = _weigh(span)
        self.is_settled = False
        self.sequence_id: int | None = None
        self.stored_as: Span | None = None

    def number(self, sequence_id: int) -> None:
        """It has its number for good; its trace remembers it."""
        self.sequence_id = sequence_id
        context = self.span.get_span_context()
        if context is not None:
            self.binding.recorder.numbers[context.span_id] = sequence_id

    def lose(self, reason: str) -> None:
        """It will not reach the store; its trace remembers why. The first loss of a trace is logged."""
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


async def store_parcels(store: LightningStore, parcels: Sequence[Parcel], converter: SpanConverter) -> None:
    """Number and store a batch; a span that ended earlier gets the smaller number. May be called again after a failure.

    A second call stores the same spans under the same numbers, and the store keeps one of each.
    """
    fresh = in_order(parcel for parcel in parcels if parcel.sequence_id is None)
    if fresh:
        attempts = [(parcel.binding.rollout_id, parcel.binding.attempt_id) for parcel in fresh]
        for parcel, sequence_id in zip(fresh, await store.get_many_span_sequence_ids(attempts), strict=True):
            parcel.number(sequence_id)
    for parcel in parcels:
        if parcel.stored_as is None and not parcel.is_settled:
            _convert(parcel, converter)
    sound = [parcel for parcel in parcels if parcel.stored_as is not None]
    await store.add_many_spans([parcel.stored_as for parcel in sound if parcel.stored_as is not None])
    for parcel in sound:
        parcel.is_settled = True


def in_order(parcels: Iterable[Parcel]) -> list[Parcel]:
    """Parcels by the time their spans ended."""
    return sorted(parcels, key=lambda parcel: parcel.span.end_time or 0)


def _convert(parcel: Parcel, converter: SpanConverter) -> None:
    binding = parcel.binding
    assert parcel.sequence_id is not None
    try:
        parcel.stored_as = converter.convert(parcel.span, binding.rollout_id, binding.attempt_id, parcel.sequence_id)
    except (ValueError, TypeError) as error:
        parcel.lose(f"it cannot be written as JSON: {type(error).__name__}: {error}")
