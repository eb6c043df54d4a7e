"""Span attributes: what a value may be, checked fast.

OpenTelemetry allows strings, booleans, numbers and flat sequences of one of them. A union of eight types says so to a
type checker but costs a validator tens of microseconds a span, because every member is tried on every token list.
`Attributes` therefore carries its own check: one pass that leans on built-ins which already refuse what does not
belong.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]

_SCALARS = frozenset({str, bool, int, float})
_NUMBERS = (int, float, bool)


def sum_of_numbers(values: Sequence[object]) -> int | float | None:
    """The sum, if every item is an int, float or bool; None otherwise.

    Adding up is several times cheaper than looking at the type of each item, and fails on everything else. The sum is
    finite only if every item is.
    """
    try:
        total = sum(values)  # type: ignore[arg-type] # a foreign item raises TypeError
    except (TypeError, OverflowError):
        return None
    return total if type(total) in _NUMBERS else None


def _checked(attributes: dict[str, object]) -> dict[str, object]:
    """The attributes with every sequence as a list, which is what JSON gives back."""
    for name, value in attributes.items():
        is_plain_list = type(value) is list and sum_of_numbers(value) is not None
        if type(value) not in _SCALARS and not is_plain_list:
            attributes[name] = _as_attribute_value(name, value)
    return attributes


def _as_attribute_value(name: str, value: object) -> object:
    if isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        values = list(value)
        if all(isinstance(item, str) for item in values) or all(isinstance(item, _NUMBERS) for item in values):
            return values
    raise PydanticCustomError(
        "attribute_value",
        "attribute '{name}' is of type {kind}; use a string, bool, number, or a flat list of strings or of numbers",
        {"name": name, "kind": type(value).__name__},
    )


class _AttributeMapping:
    """Pydantic marker: a dictionary from strings to attribute values, checked by `_checked`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        mapping = core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema())
        return core_schema.no_info_after_validator_function(_checked, mapping)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        scalar = [{"type": "string"}, {"type": "boolean"}, {"type": "number"}]
        sequences = [{"type": "array", "items": item} for item in scalar]
        return {"type": "object", "additionalProperties": {"anyOf": [*scalar, *sequences]}}


Attributes = Annotated[dict[str, AttributeValue], _AttributeMapping]
