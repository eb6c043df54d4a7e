"""Values of common Python types as JSON has them: models, dataclasses, times, sets, enums, paths, numpy's scalars."""

import dataclasses
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import BaseModel

__all__ = ["plain_attributes", "plain_value"]


def plain_value(value: Any) -> Any:
    """A value that JSON does not know, one step closer to what it knows; TypeError for other types.

    Made for `json.dumps(default=…)`, which looks at what is inside by itself.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        try:
            return sorted(value)
        except TypeError:  # of several types
            return list(value)
    if isinstance(value, (PurePath, UUID, Decimal)):
        return str(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"objects of type {type(value).__qualname__} cannot be written as JSON")


def plain_attributes(value: Any) -> Any:
    """Nested attributes with plain values; fields of a model that hold None are left out, as no attribute can.

    What is of no known type stays, for the check of the attributes to name it.
    """
    if isinstance(value, Mapping):
        return {key: plain_attributes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_attributes(item) for item in value]
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, Enum)):
        return value
    try:
        plain = plain_value(value)
    except TypeError:
        return value
    if isinstance(plain, dict):
        plain = {name: item for name, item in plain.items() if item is not None}
    return plain_attributes(plain)
