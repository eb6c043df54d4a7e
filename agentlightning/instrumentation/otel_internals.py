"""What we use of OpenTelemetry that is not public, all of it here; `tests/instrumentation/test_otel_internals.py` says
what changed when a release moves it.

The SDK's public view of a span copies or locks on every access, which costs more than all else that is done with most
spans. Where an attribute is not as expected, the public way is taken.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

_SUPPRESSED: Final = otel_context._SUPPRESS_INSTRUMENTATION_KEY
_PLAIN: Final = frozenset({str, bool, int, float})


def is_suppressed() -> bool:
    """Whether the program asked OpenTelemetry not to instrument what it does here."""
    return bool(otel_context.get_value(_SUPPRESSED))


def suppress() -> None:
    """Have what this context does from now on not instrumented."""
    otel_context.attach(otel_context.set_value(_SUPPRESSED, value=True))


def attributes_of(span: ReadableSpan) -> Mapping[str, Any]:
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
