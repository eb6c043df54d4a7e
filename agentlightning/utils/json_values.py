"""JSON of other programs and of users: names for objects whose fields nobody has checked, and readers that never raise.

Whoever writes a span decides what stands in it, so what is read from one is bounded: in levels, in digits and in size.
"""

import ast
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import orjson

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]
"""As `JsonObject`, to be read alone."""

MOST_LEVELS: Final = 200
"""Of lists and objects within each other, and of dotted names."""
MOST_DIGITS: Final = 18
"""Of a whole number in a name or a text."""
MOST_TOKENS: Final = 10**9
"""Of one call; sums of more outgrow what stores and floats hold."""


def is_encodable(value: object) -> bool:
    """Whether JSON can hold a value within a few levels of others, so that whoever gets it can write it down again."""
    # orjson encodes 254 levels.
    for _ in range(254 - MOST_LEVELS):
        value = [value]
    try:
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return False
    return True


_JSON: Final[tuple[Callable[[str], object], ...]] = (
    orjson.loads,
    # JSON as Python knows it, with infinity; integers of many digits become floats, as orjson has them.
    lambda text: json.loads(text, parse_int=lambda digits: (int if len(digits) <= MOST_DIGITS else float)(digits)),
)


def parsed(value: object, *, literals: bool = True, is_kept: bool = True) -> object:
    """What a text stands for, in JSON or as a Python literal; anything else, and what is not encodable, as it is.

    Args:
        is_kept: The value is handed on; one of which only the upper levels are read may be deeper than any encoder.
    """
    if not isinstance(value, str):
        return value
    for read in (*_JSON, ast.literal_eval) if literals else _JSON:
        try:
            found = read(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        is_shallow = not is_kept or value.count("[") + value.count("{") <= MOST_LEVELS
        return found if (read is orjson.loads and is_shallow) or is_encodable(found) else value
    return value


def as_float(number: float, most: float = sys.float_info.max) -> float:
    """A number as a float; one beyond `most`, as an integer may be, is infinite."""
    if abs(number) > most:
        return math.inf if number > 0 else -math.inf
    return float(number)


def token_count(value: object) -> int | None:
    """How many tokens a call says that it read or wrote; None if no call can."""
    return int(value) if isinstance(value, (int, float)) and 0 <= value <= MOST_TOKENS else None
