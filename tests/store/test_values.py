"""Values at the edge of the store: what is refused, how spans are written and weighed, what copies share."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import InvalidValue
from agentlightning.store.values import (
    as_json,
    check_json,
    check_span,
    span_as_json,
    span_of_json,
)
from agentlightning.types import (
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    TraceStatus,
)

NAN = math.nan
SURROGATE = "half \ud83d"
ABOVE_64_BITS = 2**64


class F(float):
    """A number as numpy makes them: a subclass of float that stays one when added up."""

    def __add__(self, other: float) -> "F":
        return F(float(self) + other)

    __radd__ = __add__


class S(str):
    __slots__ = ()


def make_span(**fields: Any) -> Span:
    return Span.from_attributes(**{"attributes": {}, "rollout_id": "ro-1", "attempt_id": "at-1", **fields})


def with_extra(**extra: Any) -> Span:
    return Span.model_validate({**make_span().model_dump(), **extra})


def with_parts(**parts: Any) -> Span:
    return make_span().model_copy(update=parts)


# ---------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(NAN, r"^Task is nan, which JSON cannot hold", id="nan"),
        pytest.param(F(NAN), r"^Task is nan", id="subclass-of-float"),
        pytest.param([math.inf, -math.inf], r"^Task\[0\] is inf", id="infinities-that-cancel-out"),
        pytest.param({"a": [0, {"b": math.inf}]}, r"^Task\['a'\]\[1\]\['b'\] is inf", id="deep-inside"),
        pytest.param(("x", (NAN,)), r"^Task\[1\]\[0\] is nan", id="in-tuples"),
        pytest.param(SURROGATE, r"^Task holds a lone surrogate at position 5", id="lone-surrogate"),
        pytest.param({"a": ["ok", SURROGATE]}, r"^Task\['a'\]\[1\] holds a lone surrogate", id="surrogate-inside"),
        pytest.param({SURROGATE: 1}, r"^Task holds a lone surrogate", id="surrogate-in-a-key"),
        pytest.param({1: "a"}, r"^Task has the key 1; keys must be strings", id="number-as-key"),
        pytest.param({"a": {1, 2}}, r"^Task\['a'\] is of type set, which JSON cannot hold", id="set"),
        pytest.param([1, object()], r"^Task\[1\] is of type object", id="object"),
        pytest.param(ABOVE_64_BITS, "^Task is an integer of more than 64 bits", id="unsigned"),
        pytest.param(-(2**63) - 1, "^Task is an integer of more than 64 bits", id="signed"),
    ],
)
@pytest.mark.parametrize("write", [check_json, as_json])
def test_value_that_json_cannot_hold_is_refused_by_its_path(
    write: Callable[[Any, str], object], value: object, message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        write(value, "Task")


def test_nesting_beyond_the_writer_is_refused() -> None:
    value: list[Any] = []
    for _ in range(300):
        value = [value]

    with pytest.raises(InvalidValue, match=r"^Task cannot be stored as JSON"):
        as_json(value, "Task")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=JSON_VALUES)
def test_value_comes_back_from_json_as_it_was(value: object) -> None:
    assert json.loads(as_json(value, "Task")) == value


# ---------------------------------------------------------------------- spans as JSON

CONTEXT = SpanContext(trace_id="t", span_id="s", is_remote=True, trace_state={"vendor": "null"})
WEIRD = SpanContext(trace_id="t", span_id="s", is_remote=False, trace_state={}, flags=[1, None])


@pytest.mark.parametrize(
    "span",
    [
        pytest.param(make_span(), id="bare"),
        pytest.param(make_span(parent_id="p", start_time=1.0, end_time=2.5), id="with-parent-and-times"),
        pytest.param(make_span(attributes={"a": "ü", "b": [1, 2], "c": [0.5], "d": True}), id="attributes"),
        pytest.param(make_span(attributes={"a": (1, 2), "b": ("x",), "c": F(0.5), "d": [F(0.5)]}), id="subclasses"),
        pytest.param(make_span(status=TraceStatus(status_code="ERROR", description="null")), id="status"),
        pytest.param(make_span(status=TraceStatus(status_code="OK", why={"a": None})), id="extra-field-of-status"),
        pytest.param(make_span(resource=OtelResource(attributes={"a": [1]}, schema_url="u")), id="resource"),
        pytest.param(
            with_parts(events=[Event(name="e", attributes={"a": 1}, timestamp=None, why="x")]), id="event-with-extra"
        ),
        pytest.param(with_parts(links=[Link(context=CONTEXT, attributes=None), Link(context=WEIRD)]), id="links"),
        pytest.param(with_parts(context=None, parent=WEIRD), id="contexts"),
        pytest.param(with_extra(tenant={"id": [1, None, {"a": "b"}]}, empty=None), id="extra-fields"),
    ],
)
def test_span_is_written_as_the_model_writes_itself_and_read_back(span: Span) -> None:
    body = span_as_json(span)

    assert json.loads(body) == json.loads(span.model_dump_json())
    assert span_of_json(body) == Span.model_validate_json(body)


def test_a_span_that_lacks_a_newer_field_is_read() -> None:
    span = make_span()
    fields = json.loads(span_as_json(span))
    del fields["status"]["description"]

    assert span_of_json(json.dumps(fields).encode()).model_dump() == span.model_dump()


@pytest.mark.parametrize(
    "span",
    [
        pytest.param(make_span(attributes={"a": F(NAN)}), id="subclass-of-float"),
        pytest.param(make_span(attributes={"a": (math.inf, -math.inf)}), id="infinities-in-a-tuple"),
        pytest.param(make_span(attributes={"a": [1, 2**70]}), id="integer-above-64-bits"),
        pytest.param(make_span(attributes={"a": ABOVE_64_BITS}), id="unsigned-integer-above-64-bits"),
        pytest.param(with_extra(tenant=NAN), id="extra-field"),
        pytest.param(with_extra(tenant={"a": [1, math.inf]}), id="inside-an-extra-field"),
        pytest.param(with_extra(tenant={1: 2}), id="key-in-an-extra-field"),
        pytest.param(with_extra(tenant={1, 2}), id="set-as-extra-field"),
        pytest.param(with_extra(tenant=SURROGATE), id="surrogate-in-an-extra-field"),
        pytest.param(with_parts(events=[Event(name="e", attributes={"a": NAN})]), id="attribute-of-an-event"),
        pytest.param(with_parts(events=[Event(name="e", attributes={}, timestamp=NAN)]), id="time-of-an-event"),
        pytest.param(with_parts(links=[Link(context=CONTEXT, attributes={"a": [NAN]})]), id="attribute-of-a-link"),
        pytest.param(with_parts(resource=OtelResource(attributes={"a": NAN}, schema_url="")), id="resource"),
    ],
)
@pytest.mark.parametrize("take", [span_as_json, check_span])
def test_part_of_a_span_that_json_cannot_hold_is_refused(take: Callable[[Span], object], span: Span) -> None:
    with pytest.raises(InvalidValue, match=r"agentlightning\.virtual"):
        take(span)


@pytest.mark.parametrize("part", ["name", "span_id", "trace_id"])
@pytest.mark.parametrize("take", [span_as_json, check_span])
def test_surrogate_in_a_text_of_a_span_is_refused(take: Callable[[Span], object], part: str) -> None:
    with pytest.raises(InvalidValue, match=r"^Span '.*' holds a lone surrogate at position"):
        take(make_span(**{part: SURROGATE}))


LABELS = st.text(max_size=20)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
SEQUENCES = st.lists(LABELS, max_size=20) | st.lists(NUMBERS) | st.lists(st.booleans()) | st.lists(NUMBERS).map(tuple)
TEXTS = st.text()
LONG_SEQUENCES = st.tuples(TEXTS | NUMBERS, st.integers(0, 2000)).map(lambda drawn: [drawn[0]] * drawn[1])
LONG_TEXTS = st.tuples(LABELS, st.integers(0, 500)).map(lambda drawn: drawn[0] * drawn[1])
PLAIN_VALUES = st.booleans() | NUMBERS | LABELS | LONG_TEXTS | SEQUENCES | LONG_SEQUENCES
ATTRIBUTES = st.dictionaries(LABELS, PLAIN_VALUES)
EVENTS = st.builds(Event, name=LABELS, attributes=ATTRIBUTES, timestamp=st.none() | st.floats(0, 1e10))
LINKS = st.builds(Link, context=st.just(CONTEXT), attributes=st.none() | ATTRIBUTES)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    time_or_none = st.none() | st.floats(0, 1e10)
    span = make_span(
        attributes=draw(st.dictionaries(LABELS, PLAIN_VALUES | NUMBERS.map(F))),
        name=draw(LABELS),
        parent_id=draw(st.none() | st.just("p" * 16)),
        start_time=draw(time_or_none),
        end_time=draw(time_or_none),
        status=TraceStatus(status_code="OK", description=draw(st.none() | LABELS)),
        resource=OtelResource(attributes=draw(st.just({}) | ATTRIBUTES), schema_url=""),
    )
    parts = {"events": draw(st.lists(EVENTS, max_size=3)), "links": draw(st.lists(LINKS, max_size=3))}
    return Span.model_validate({**span.model_dump(), **parts, **draw(st.just({}) | st.just({"tenant": {"id": 1}}))})


@settings(max_examples=15)
@given(span=spans())
def test_any_span_is_written_as_the_model_writes_itself_and_read_back(span: Span) -> None:
    body = span_as_json(span)

    assert json.loads(body) == json.loads(span.model_dump_json())
    assert span_of_json(body) == Span.model_validate_json(body)
