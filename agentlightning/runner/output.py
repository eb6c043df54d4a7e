"""What an agent returned, as JSON that every store can keep: `Rollout.output`.

Nothing is refused. A model, a data class or a response of an SDK becomes a mapping of its fields, what JSON has no word
for becomes text, and what is too large is cut where a mark says how much there was. One walk does all of it, and stops
when the limit is used up, so that a result that contains itself costs no more than a large one.
"""

import dataclasses
import datetime as dt
import decimal
import enum
import math
import pathlib
import uuid
from collections.abc import Collection, Mapping, Set
from typing import Any, Final

import orjson
from pydantic import BaseModel

from agentlightning.types.resources import Resource

__all__ = ["MAX_OUTPUT_BYTES", "output_of"]

MAX_OUTPUT_BYTES: Final = 64 * 1024
"""Of JSON that are kept of an output, but for the marks."""
_MOST_LEVELS: Final = 50
"""Of lists and mappings within each other; of what lies deeper only the type is kept."""
_LARGEST_INTEGER: Final = 2**63 - 1
_BYTES_OF_A_NUMBER: Final = 8
_BYTES_AROUND: Final = 3
"""Quotes or brackets, and the comma behind them."""
_MARK: Final = "…"
_WRITTEN_AS_TEXT: Final = (
    dt.date,
    dt.time,
    dt.timedelta,
    decimal.Decimal,
    pathlib.PurePath,
    uuid.UUID,
)


def output_of(result: object) -> Any:
    """A result as plain JSON of at most `MAX_OUTPUT_BYTES`; never raises."""
    return _Walk().plain(result, 0)


class _Walk:
    """One result on its way to JSON."""

    def __init__(self) -> None:
        self._left = MAX_OUTPUT_BYTES

    def plain(self, value: Any, level: int) -> Any:
        try:
            return self._plain(value, level)
        except Exception:  # noqa: BLE001 # an object of the user's may raise anything when it is looked at
            return self._text(_described(value), level)

    def _plain(self, value: Any, level: int) -> Any:
        if value is None or isinstance(value, bool):
            self._left -= _BYTES_OF_A_NUMBER
            return value
        if isinstance(value, enum.Enum):
            return self.plain(value.value, level)
        if isinstance(value, str):
            return self._text(str(value), level)
        if isinstance(value, (int, float)):
            return self._number(value, level)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._bytes(bytes(value[: max(self._left, 0) + 1]), len(value), level)
        if isinstance(value, _WRITTEN_AS_TEXT):
            return self._text(str(value), level)
        if level >= _MOST_LEVELS:
            return self._text(f"<{type(value).__name__}>", level)
        if isinstance(value, Mapping):
            return self._mapping(value, level)
        if isinstance(value, (list, tuple, Set)):
            return self._list(value, level)
        fields = _fields_of(value)
        return self._text(_described(value), level) if fields is None else self.plain(fields, level + 1)

    def _number(self, value: float, level: int) -> Any:
        self._left -= _BYTES_OF_A_NUMBER
        if isinstance(value, int):
            if abs(value) <= _LARGEST_INTEGER:
                return int(value)
            try:
                return self._text(str(value), level)
            except ValueError:  # more digits than Python writes
                return self._text(hex(value), level)
        return float(value) if math.isfinite(value) else str(float(value))  # JSON has no word for the others

    def _text(self, text: str, level: int) -> str:
        """Text within something larger takes half of what is left at most, so that others have room too."""
        limit = max(self._left // 2 if level else self._left, _BYTES_AROUND)
        kept = text[: limit - _BYTES_AROUND]
        kept = kept if kept.isascii() else kept.encode(errors="replace").decode()  # lone surrogates
        while (size := len(orjson.dumps(kept)) + 1) > limit and kept:
            kept = kept[: min(len(kept) - 1, len(kept) * limit // size)]
        self._left -= size
        return kept if len(kept) == len(text) else f"{kept}{_MARK} ({len(text):,} characters in all)"

    def _bytes(self, start: bytes, count: int, level: int) -> str:
        text = self._text(repr(start), level)
        return text if count == len(start) else f"{text.partition(_MARK)[0]}{_MARK} ({count:,} bytes in all)"

    def _mapping(self, value: Mapping[Any, Any], level: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, item in value.items():
            if self._left <= 0:
                kept[_MARK] = f"({len(value):,} items in all)"
                break
            name = self._text(key if isinstance(key, str) else str(key), level + 1)
            kept[name] = self.plain(item, level + 1)
        self._left -= _BYTES_AROUND
        return kept

    def _list(self, value: Collection[Any], level: int) -> list[Any]:
        kept: list[Any] = []
        for item in value:
            if self._left <= 0:
                kept.append(f"{_MARK} ({len(value):,} items in all)")
                break
            kept.append(self.plain(item, level + 1))
        self._left -= _BYTES_AROUND
        return kept


def _fields_of(value: Any) -> object:
    """An object as a mapping, a list or a number; None if it cannot be taken apart."""
    if isinstance(value, type):
        return None
    if isinstance(value, Resource):
        return value.model_dump(mode="json", exclude={"api_key"})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", warnings=False)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if getattr(value, "nbytes", MAX_OUTPUT_BYTES + 1) <= MAX_OUTPUT_BYTES and hasattr(value, "tolist"):
        return _taken(value.tolist())  # an array, or a single number of one
    for name in ("model_dump", "to_dict"):
        convert = getattr(value, name, None)
        if callable(convert) and (fields := _taken(convert())) is not None:
            return fields
    return None


def _taken(fields: object) -> object:
    is_plain = isinstance(fields, (Mapping, list, tuple, str, int, float))
    return fields if is_plain else None


def _described(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 # as above
        return f"<{type(value).__name__}>"
