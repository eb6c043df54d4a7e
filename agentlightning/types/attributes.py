"""Span attributes: what a value may be, checked fast.

OpenTelemetry allows strings, booleans, numbers and flat sequences of one of them. A union of eight types says so to a
type checker but costs a validator tens of microseconds a span, because every member is tried on every token list.
`Attributes` therefore carries its own check: one pass that leans on built-ins which already refuse what does not
belong.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

__all__ = ["AttributeValue", "Attributes", "sum_of_numbers"]

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]

_SCALARS = frozenset({str, bool, int, float})
_NUMBERS = (int, float, bool)


def sum_of_numbers(values: Sequence[object]) -> float | None:
    """The sum, if every item is an int, float or bool; None otherwise.

    Adding up is several times cheaper than looking at the type of each item, and fails on everything else. The sum is
    finite only if every item is.
    """
    try:
        total = sum(values)  # type: ignore[arg-type] # a foreign item raises TypeError
    except TypeError:
        return None
    return total if type(total) in _NUMBERS else None


def _is_attribute_value(value: object) -> bool:
    if type(value) in _SCALARS:
        return True
    if isinstance(value, (list, tuple)):
        return sum_of_numbers(value) is not None or all(isinstance(item, str) for item in value) or _are_numbers(value)
    if isinstance(value, (str, bool, int, float)):
        return True
    return (
        isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)) and _is_attribute_value(list(value))
    )


def _are_numbers(values: Sequence[object]) -> bool:
    """The slow answer, for number types of other libraries that subclass ours."""
    return all(isinstance(item, _NUMBERS) for item in values)


def _checked(attributes: dict[str, Any]) -> dict[str, Any]:
    for name, value in attributes.items():
        if not _is_attribute_value(value):
            raise PydanticCustomError(
                "attribute_value",
                "attribute '{name}' is a {kind}; use a string, bool, number, or a flat list of strings or of numbers",
                {"name": name, "kind": type(value).__name__},
            )
    return attributes


class _AttributeMapping:
    """Pydantic marker: a dictionary from strings to attribute values, checked by `_checked`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        mapping = core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema())
        from_mapping = core_schema.no_info_before_validator_function(_as_dict, mapping)
        return core_schema.no_info_after_validator_function(
            _checked, core_schema.json_or_python_schema(json_schema=mapping, python_schema=from_mapping)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        scalar = [{"type": "string"}, {"type": "boolean"}, {"type": "number"}]
        sequences = [{"type": "array", "items": item} for item in scalar]
        return {"type": "object", "additionalProperties": {"anyOf": [*scalar, *sequences]}}


def _as_dict(attributes: object) -> object:
    """OpenTelemetry hands out mapping proxies; pydantic wants a dictionary."""
    return dict(attributes) if isinstance(attributes, Mapping) else attributes


Attributes = Annotated[dict[str, AttributeValue], _AttributeMapping]
