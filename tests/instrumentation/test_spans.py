"""Spans told in two halves: what is written on them is what OpenTelemetry itself would have written."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider

from agentlightning.instrumentation import spans
from agentlightning.instrumentation.spans import Step

UNLIMITED = SpanLimits(max_span_attributes=SpanLimits.UNSET)


class Text(str):
    """A text of a kind of its own, which OpenTelemetry may treat as it likes."""


PLAIN: dict[str, Any] = {"text": "a", "number": 1, "fraction": 0.5, "truth": True}
ODD: list[Mapping[str, Any]] = [
    {"ids": [1, 2], "a": "b"},
    {"none": None, "a": "b"},
    {"": "nameless", "a": "b"},
    {"kind": Text("a")},
    {"bytes": b"a"},
]


def provider(limits: SpanLimits) -> TracerProvider:
    return TracerProvider(span_limits=limits, shutdown_on_exit=False)


def written_by_us(made: TracerProvider, *writings: Mapping[str, Any]) -> dict[str, Any]:
    step = Step.__new__(Step)
    step.span = made.get_tracer("test").start_span("step", attributes={"first": "here", "text": "before"})
    for attributes in writings:
        step.set(attributes)
    return attributes_of(step.span)


def written_by_opentelemetry(made: TracerProvider, *writings: Mapping[str, Any]) -> dict[str, Any]:
    span = made.get_tracer("test").start_span("step", attributes={"first": "here", "text": "before"})
    for attributes in writings:
        span.set_attributes(attributes)
    return attributes_of(span)


def attributes_of(span: trace.Span) -> dict[str, Any]:
    assert isinstance(span, ReadableSpan)
    return dict(span.attributes or {})


@pytest.mark.parametrize("attributes", [PLAIN, *ODD], ids=["plain", "list", "none", "nameless", "subclass", "bytes"])
@pytest.mark.parametrize(
    "limits",
    [UNLIMITED, SpanLimits(), SpanLimits(max_span_attributes=2), SpanLimits(max_span_attribute_length=1)],
    ids=["unlimited", "usual", "few", "short"],
)
def test_attributes_are_written_as_opentelemetry_writes_them(limits: SpanLimits, attributes: Mapping[str, Any]) -> None:
    ours = written_by_us(provider(limits), attributes, PLAIN)

    assert ours == written_by_opentelemetry(provider(limits), attributes, PLAIN)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1), st.one_of(st.text(), st.booleans(), st.integers(), st.floats(allow_nan=False)), max_size=5
    )
)
def test_any_plain_values_are_written_as_opentelemetry_writes_them(attributes: dict[str, Any]) -> None:
    made = provider(UNLIMITED)

    assert written_by_us(made, attributes) == written_by_opentelemetry(made, attributes)


def test_plain_values_take_the_short_way() -> None:
    span = provider(UNLIMITED).get_tracer("test").start_span("step")

    assert spans._set_plainly(span, PLAIN)
    assert attributes_of(span) == PLAIN


def test_nothing_is_written_on_a_span_that_has_ended() -> None:
    span = provider(UNLIMITED).get_tracer("test").start_span("step")
    span.end()

    assert not spans._set_plainly(span, PLAIN)
    assert attributes_of(span) == {}


def test_a_span_that_is_not_recorded_takes_anything() -> None:
    assert not spans._set_plainly(trace.INVALID_SPAN, PLAIN)
