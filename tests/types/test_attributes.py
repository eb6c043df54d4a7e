"""Span attributes: strings, booleans, numbers and flat sequences of one kind; nothing else."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from agentlightning.types.attributes import Attributes, sum_of_numbers

ADAPTER: TypeAdapter[dict[str, Any]] = TypeAdapter(Attributes)


class F(float):
    """A number as numpy makes them: a subclass of float that stays one when added up."""

    def __add__(self, other: float) -> "F":
        return F(float(self) + other)

    __radd__ = __add__


class S(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    ["text", "", True, 7, 0.5, [], ["a", "b"], [1, 2], [0.5, 1.5], [True, False], [1, 0.5]],
    ids=repr,
)
def test_attribute_is_accepted_as_it_is(value: object) -> None:
    accepted = ADAPTER.validate_python({"key": value})["key"]

    assert accepted == value
    assert type(accepted) is type(value)


@pytest.mark.parametrize("value", [(), ("a",), (1, 2), (0.5,), range(3)], ids=repr)
def test_other_sequences_become_lists(value: Any) -> None:
    accepted = ADAPTER.validate_python({"key": value})["key"]

    assert accepted == list(value)
    assert type(accepted) is list


@pytest.mark.parametrize(
    "value", [F(0.5), S("text"), [F(0.5), F(1.5)], [1, F(0.5)], [S("a"), "b"]], ids=lambda value: type(value).__name__
)
def test_subclass_of_an_accepted_type_is_accepted(value: object) -> None:
    assert ADAPTER.validate_python({"key": value}) == {"key": value}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"nested": 1}, "dict"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
        (bytearray(b"bytes"), "bytearray"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (object(), "object"),
        (["a", 1], "list"),
        ([1, "a"], "list"),
        ([None], "list"),
        (["a", None], "list"),
        ([[1], [2]], "list"),
        ([{"nested": 1}], "list"),
        ([b"bytes"], "list"),
        ((1, "a"), "tuple"),
    ],
    ids=lambda case: case if isinstance(case, str) else None,
)
def test_attribute_of_another_type_is_refused_by_name(value: object, kind: str) -> None:
    with pytest.raises(ValidationError, match=f"attribute 'key' is of type {kind}; use a string"):
        ADAPTER.validate_python({"fine": 1, "key": value})


@pytest.mark.parametrize("attributes", [None, "text", [("key", 1)], {1: "a"}], ids=["none", "text", "pairs", "int-key"])
def test_anything_but_a_mapping_from_strings_is_refused(attributes: object) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(attributes)


@pytest.mark.parametrize("payload", ['{"key": {"nested": 1}}', '{"key": null}', '{"key": ["a", 1]}', "[]"])
def test_attributes_from_json_are_checked_as_well(payload: str) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_json(payload)


def test_schema_offers_scalars_and_lists_of_them() -> None:
    choices = ADAPTER.json_schema()["additionalProperties"]["anyOf"]
    assert [choice["type"] for choice in choices] == ["string", "boolean", "number", "array", "array", "array"]


@pytest.mark.parametrize(
    ("values", "total"),
    [([], 0), ([1, 2], 3), ([0.5, 1], 1.5), ((True, True), 2), (["a"], None), ([1, None], None), ([1j], None)],
    ids=repr,
)
def test_only_numbers_have_a_sum(values: list[object], total: float | None) -> None:
    assert sum_of_numbers(values) == total
