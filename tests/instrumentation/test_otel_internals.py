"""What is not public of OpenTelemetry and used all the same: a failure here says what a new release has moved."""

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace import Span as LiveSpan

from agentlightning.instrumentation import otel_internals

UNLIMITED = SpanLimits(max_span_attributes=SpanLimits.UNSET)


class Text(str):
    """A text of a kind of its own, which OpenTelemetry may treat as it likes."""


PLAIN: dict[str, Any] = {"text": "a", "number": 1, "fraction": 0.5, "truth": True}
ODD: dict[str, Mapping[str, Any]] = {
    "list": {"ids": [1, 2], "a": "b"},
    "none": {"none": None, "a": "b"},
    "nameless": {"": "nameless", "a": "b"},
    "subclass": {"kind": Text("a")},
    "bytes": {"bytes": b"a"},
}


def started(limits: SpanLimits = UNLIMITED, **attributes: Any) -> LiveSpan:
    provider = TracerProvider(span_limits=limits, shutdown_on_exit=False)
    span = provider.get_tracer("test").start_span("step", attributes={"first": "here", **attributes})
    assert isinstance(span, LiveSpan)
    return span


def both_ways(limits: SpanLimits, *writings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is on a span after OpenTelemetry has written attributes, and after we have."""
    theirs, ours = started(limits, text="before"), started(limits, text="before")
    for attributes in writings:
        theirs.set_attributes(attributes)
        otel_internals.set_attributes(ours, attributes)
    return [dict(span.attributes or {}) for span in (theirs, ours)]


@pytest.mark.parametrize("attributes", [PLAIN, *ODD.values()], ids=["plain", *ODD])
@pytest.mark.parametrize(
    "limits",
    [UNLIMITED, SpanLimits(), SpanLimits(max_span_attributes=2), SpanLimits(max_span_attribute_length=1)],
    ids=["unlimited", "usual", "few", "short"],
)
def test_attributes_are_written_as_opentelemetry_writes_them(limits: SpanLimits, attributes: Mapping[str, Any]) -> None:
    theirs, ours = both_ways(limits, attributes, PLAIN)
    assert ours == theirs


def test_plain_values_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    span = started()
    monkeypatch.setattr(type(span), "set_attributes", None)
    otel_internals.set_attributes(span, PLAIN)
    assert dict(span.attributes or {}) == {"first": "here", **PLAIN}


def test_nothing_is_written_on_a_span_that_has_ended_or_is_not_recorded() -> None:
    span = started()
    span.end()

    otel_internals.set_attributes(span, PLAIN)
    otel_internals.set_attributes(trace.INVALID_SPAN, PLAIN)

    assert dict(span.attributes or {}) == {"first": "here"}


def test_what_a_span_holds_is_read_without_a_copy() -> None:
    span = started()
    span.add_event("happened")
    span.add_link(span.get_span_context())

    for read in (otel_internals.attributes_of, otel_internals.events_of, otel_internals.links_of):
        assert read(span) is read(span), read.__name__
    assert dict(otel_internals.attributes_of(span)) == {"first": "here"}
    assert [event.name for event in otel_internals.events_of(span)] == ["happened"]
    assert len(otel_internals.links_of(span)) == 1


def test_a_span_that_keeps_nothing_inside_is_read_in_the_public_way() -> None:
    class Public(ReadableSpan):
        def __init__(self) -> None:
            pass

        attributes = {"a": 1}  # type: ignore[assignment] # noqa: RUF012 # as a span of somebody else may have it
        events = links = ()  # type: ignore[assignment]

    span = Public()

    assert otel_internals.attributes_of(span) == {"a": 1}
    assert (otel_internals.events_of(span), otel_internals.links_of(span)) == ((), ())


def test_suppression_has_the_key_that_instrumentations_of_opentelemetry_look_at() -> None:
    before = otel_context.get_current()
    was_suppressed = otel_internals.is_suppressed()

    otel_internals.suppress()

    assert (was_suppressed, otel_internals.is_suppressed()) == (False, True)
    assert [key for key in otel_context.get_current() if key.startswith("suppress_instrumentation")]
    otel_context.attach(before)
