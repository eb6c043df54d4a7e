"""Attributes flat and nested, tags, links and exceptions."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning.semconv import LinkPydanticModel
from agentlightning.types import Span
from agentlightning.utils.otel import (
    check_attributes_sanity,
    extract_links_from_attributes,
    extract_tags_from_attributes,
    filter_and_unflatten_attributes,
    filter_attributes,
    flatten_attributes,
    format_exception_attributes,
    get_span_processors,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
    sanitize_attribute_value,
    sanitize_attributes,
    unflatten_attributes,
)

NESTED: list[tuple[Any, dict[str, Any]]] = [
    ({"a": {"b": 1}}, {"a.b": 1}),
    ({"a": [{"b": 1}, {"b": 2}]}, {"a.0.b": 1, "a.1.b": 2}),
    ({"a": [1, 2]}, {"a": [1, 2]}),
    ([{"a": 1}, {"a": 2}], {"0.a": 1, "1.a": 2}),
    ({"a": 1, "b": "x"}, {"a": 1, "b": "x"}),
    ({}, {}),
    ({"a": ["x", 1], "b": [1, 0.5]}, {"a.0": "x", "a.1": 1, "b.0": 1, "b.1": 0.5}),
]


@pytest.mark.parametrize(("nested", "flat"), NESTED)
def test_nested_values_get_dotted_keys_and_come_back(nested: Any, flat: dict[str, Any]) -> None:
    assert flatten_attributes(nested) == flat
    assert unflatten_attributes(flat) == nested


def test_lists_of_values_may_be_expanded_too() -> None:
    flat = flatten_attributes({"a": ["x", "y"], "b": []}, expand_leaf_lists=True)

    assert flat == {"a.0": "x", "a.1": "y"}
    assert unflatten_attributes(flat) == {"a": ["x", "y"]}


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="attribute keys are strings"):
        flatten_attributes({"a": {1.5: 2}})


@pytest.mark.parametrize("flat", [{"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}])
def test_a_key_with_a_value_and_keys_below_it_keeps_both(flat: dict[str, Any]) -> None:
    assert unflatten_attributes(flat) == {"a": {"": 1, "b": 2}}


def test_attributes_are_chosen_by_prefix() -> None:
    attributes = {"a.b": 1, "a": 2, "ab": 3, "a.c.d": 4}

    assert filter_attributes(attributes, "a") == {"a.b": 1, "a": 2, "a.c.d": 4}
    assert filter_and_unflatten_attributes(attributes, "a") == {"b": 1, "c": {"d": 4}}


@pytest.mark.parametrize(
    ("value", "sane"),
    [
        ("x", "x"),
        ((1, 2), [1, 2]),
        ([1, 2.5], [1.0, 2.5]),
        ([True, 2], [1, 2]),
        ([1, "x"], '[1, "x"]'),
        ([None], "[null]"),
        ({"ä": None}, '{"ä": null}'),
        (None, "null"),
        (object, "\"<class 'object'>\""),
        ([], []),
    ],
)
def test_any_value_can_be_made_an_attribute(value: Any, sane: Any) -> None:
    assert repr(sanitize_attribute_value(value)) == repr(sane)  # 1 is not 1.0, nor True


def test_without_force_what_json_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="Attribute 'a': A value of type type cannot be an attribute"):
        sanitize_attributes({"a": object}, force=False)


@pytest.mark.parametrize("value", [None, {}, [1, "x"], [[1]], float("nan"), b"x"])
def test_a_value_no_attribute_can_hold_is_named(value: Any) -> None:
    check_attributes_sanity({"a": 1, "b": ["x"], "c": True})
    with pytest.raises(ValueError, match="Attribute 'bad'"):
        check_attributes_sanity({"bad": value})


def test_tags_come_back() -> None:
    assert extract_tags_from_attributes({"x": 1, **make_tag_attributes(["a", "b"])}) == ["a", "b"]
    assert extract_tags_from_attributes({"agentlightning.tag": ["a"]}) == ["a"]
    assert extract_tags_from_attributes({}) == []


def test_links_come_back() -> None:
    links = extract_links_from_attributes(make_link_attributes({"gen_ai.response.id": "r-1", "span_id": "ab"}))

    assert links == [
        LinkPydanticModel(key_match="gen_ai.response.id", value_match="r-1"),
        LinkPydanticModel(key_match="span_id", value_match="ab"),
    ]
    assert extract_links_from_attributes({}) == []


@pytest.mark.parametrize("attributes", [{"agentlightning.link.1.key_match": "a"}, {"agentlightning.link.0.key": "a"}])
def test_a_broken_link_is_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"[Ll]ink"):
        extract_links_from_attributes(attributes)


def test_linked_spans_are_found() -> None:
    ours = Span.from_attributes(attributes={"id": 7}, span_id="ab" * 8)
    theirs = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("x", attributes={"id": "8"})

    def linked(**links: str) -> list[Any]:
        found = extract_links_from_attributes(make_link_attributes(links))
        return query_linked_spans([ours, theirs], found)

    assert linked(id="7") == [ours]
    assert linked(id="8") == [theirs]
    assert linked(span_id="ab" * 8) == [ours]
    assert linked(trace_id=f"{theirs.get_span_context().trace_id:032x}", id="8") == [theirs]
    assert linked(other="1") == []


def test_an_exception_is_described() -> None:
    attributes = format_exception_attributes(KeyError("x"))

    assert attributes["exception.type"] == "KeyError"
    assert attributes["exception.stacktrace"].strip() == "KeyError: 'x'"


def test_processors_of_a_provider_are_found_by_type() -> None:
    provider, wanted = TracerProvider(shutdown_on_exit=False), SimpleSpanProcessor(InMemorySpanExporter())
    provider.add_span_processor(wanted)

    assert get_span_processors(provider, SimpleSpanProcessor) == [wanted]
    assert get_span_processors(provider, BatchSpanProcessor) == []
