"""What we use of OpenTelemetry that is not public, all of it here; `tests/instrumentation/test_otel_internals.py` says
what changed when a release moves it.

The SDK's public view of a span copies or locks on every access, which costs more than all else that is done with most
spans. Where an attribute is not as expected, the public way is taken.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from agentlightning.types.tracer import SpanLike

_SUPPRESSED: Final = otel_context._SUPPRESS_INSTRUMENTATION_KEY
_PLAIN: Final = frozenset({str, bool, int, float})
Attributes: TypeAlias = Mapping[str, AttributeValue]


def is_suppressed() -> bool:
    """Whether the program asked OpenTelemetry not to instrument what it does here."""
    return bool(otel_context.get_value(_SUPPRESSED))


def suppress() -> None:
    """Have what this context does from now on not instrumented."""
    otel_context.attach(otel_context.set_value(_SUPPRESSED, value=True))


def attributes_of(span: SpanLike) -> Mapping[str, Any]:
    """The attributes, not to be changed, straight from the SDK's dictionary: its own view is ten times slower."""
    held: Mapping[str, object] | None = getattr(getattr(span, "_attributes", None), "_dict", None)
    return held if held is not None else (span.attributes or {})


def events_of(span: ReadableSpan) -> Sequence[Any]:
    """The events, not to be changed: the SDK's own view is a copy, and most spans have none."""
    held: Sequence[object] | None = getattr(span, "_events", None)
    return held if held is not None else span.events


def links_of(span: ReadableSpan) -> Sequence[Any]:
    """The links, not to be changed."""
    held: Sequence[object] | None = getattr(span, "_links", None)
    return held if held is not None else span.links


class _DeferredAttributes(BoundedAttributes):
    """The attributes of an ended span, some of which are computed when somebody first reads it by the public way."""

    def __init__(self, held: BoundedAttributes, compute: Callable[[], Attributes]) -> None:
        super().__init__(held.maxlen, max_value_len=held.max_value_len)
        self._dict, self._compute = held._dict, compute

    @functools.cached_property
    def whole(self) -> BoundedAttributes:
        return BoundedAttributes(self.maxlen, {**self._compute(), **self._dict}, max_value_len=self.max_value_len)

    def __getitem__(self, key: str) -> Any:
        return self.whole[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)

    def copy(self) -> Any:
        return self.whole.copy()


def defer_attributes(span: Span, compute: Callable[[], Attributes]) -> None:
    """Add attributes to a span that ends next, but compute them only if somebody reads the attributes of that."""
    held: object = getattr(span, "_attributes", None)
    if isinstance(held, BoundedAttributes):
        vars(span)["_attributes"] = _DeferredAttributes(held, compute)
    else:
        span.set_attributes(compute())


def settled(span: ReadableSpan, *, is_whole: bool) -> ReadableSpan:
    """The span with all of its attributes computed or, if it need not be whole, without those that were deferred."""
    held: object = getattr(span, "_attributes", None)
    if isinstance(held, _DeferredAttributes):
        span = copy.copy(span)
        vars(span)["_attributes"] = held.whole if is_whole else held._dict
    return span


def set_attributes(span: Span, attributes: Mapping[str, AttributeValue]) -> None:
    """As `span.set_attributes`, which looks at every value for what it cannot hold.

    That takes as long as to read a model's answer. Texts and numbers it always can hold, unless the provider limits
    their number or length.
    """
    held: Any = getattr(span, "_attributes", None)
    is_unlimited = type(held) is BoundedAttributes and held.maxlen is None and held.max_value_len is None
    is_plain = _PLAIN.issuperset(map(type, attributes.values())) and "" not in attributes
    if is_unlimited and is_plain and span.is_recording():
        with held._lock:
            held._dict.update(attributes)
    else:
        span.set_attributes(attributes)
