"""Attributes of nested values, and exceptions."""

from typing import Any

import pytest

from agentlightning.utils.otel import (
    check_attributes_sanity,
    flatten_attributes,
    format_exception_attributes,
    sanitize_attribute_value,
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
def test_nested_values_get_dotted_keys(nested: Any, flat: dict[str, Any]) -> None:
    assert flatten_attributes(nested) == flat


def test_lists_of_values_may_be_expanded_too() -> None:
    flat = flatten_attributes({"a": ["x", "y"], "b": []}, expand_leaf_lists=True)

    assert flat == {"a.0": "x", "a.1": "y"}


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="attribute keys are strings"):
        flatten_attributes({"a": {1.5: 2}})


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


@pytest.mark.parametrize("value", [None, {}, [1, "x"], [[1]], float("nan"), b"x"])
def test_a_value_no_attribute_can_hold_is_named(value: Any) -> None:
    check_attributes_sanity({"a": 1, "b": ["x"], "c": True})
    with pytest.raises(ValueError, match="Attribute 'bad'"):
        check_attributes_sanity({"bad": value})


def test_an_exception_is_described() -> None:
    attributes = format_exception_attributes(KeyError("x"))

    assert attributes["exception.type"] == "KeyError"
    assert attributes["exception.stacktrace"].strip() == "KeyError: 'x'"
