"""The two formats of OTLP traces, protobuf and JSON, seen through the few verbs of `Message`.

JSON is OTLP's own dialect of it: ids are hexadecimal, 64-bit numbers may be text, enumerations may be numbers or names,
unknown fields are not looked at, and null is the same as absent. It needs no extra package; protobuf does. Whatever is
not OTLP raises `InvalidValue`, when it is read or when the field is asked for.

Our attributes hold text, numbers, booleans and flat lists. Of OTLP's other values, bytes become base64, NaN and the
infinities become the words OTLP JSON has for them, mappings and lists of several kinds become JSON text, and an
attribute without a value is left out.
"""

import base64
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import orjson

from agentlightning.errors import ConfigurationError, InvalidValue
from agentlightning.types.attributes import Attributes, sum_of_numbers

__all__ = ["JSON", "PROTOBUF", "Message", "essence", "quoted", "read_message", "trace_service", "whole_number"]

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

_SMALLEST_INT64 = -(2**63)
_LARGEST_INT64 = 2**63 - 1
_LARGEST_UINT64 = 2**64 - 1
_DEEPEST_VALUE = 64
_LONGEST_QUOTE = 80


class Message(Protocol):
    """An OTLP message in either format; fields go by their protobuf names, and absent ones have protobuf's defaults."""

    def text(self, name: str) -> str: ...

    def number(self, name: str) -> int: ...

    def identifier(self, name: str) -> str:
        """An id as text in lower case: hexadecimal, unless the sender was wrong."""

    def choice(self, name: str, members: Sequence[str]) -> str:
        """The member of an enumeration; one that is not known is the first."""

    def part(self, name: str) -> "Message": ...

    def parts(self, name: str) -> Iterator["Message"]: ...

    def attributes(self) -> Attributes: ...


def read_message(body: bytes, media_type: str) -> Message:
    """The ExportTraceServiceRequest of a body."""
    return _read_json(body) if essence(media_type) == JSON else _read_protobuf(body)


def essence(media_type: str) -> str:
    """A media type without its parameters, which must be one of the two formats."""
    name = media_type.partition(";")[0].strip().lower()
    if name not in (PROTOBUF, JSON):
        raise InvalidValue(f"Content type {quoted(media_type)} is not OTLP; send {PROTOBUF} or {JSON}.")
    return name


def quoted(value: object) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"


def whole_number(value: object, name: str, *, least: int, most: int) -> int:
    """A number that may be written as text; `name` is what a refusal calls it."""
    number = value
    if isinstance(value, str) and _is_decimal(value):
        number = int(value)
    if isinstance(value, float) and value.is_integer():
        number = int(value)
    if isinstance(number, int) and not isinstance(number, bool) and least <= number <= most:
        return number
    raise InvalidValue(f"{name} is {quoted(value)}; give a whole number from {least} to {most}.")


_is_decimal = re.compile("-?[0-9]{1,20}").fullmatch


def _as_attributes(pairs: Iterable[tuple[str, Any]]) -> Attributes:
    """Attributes, with what ours cannot hold as text; of several with one name the last counts."""
    attributes: Attributes = {}
    for key, value in pairs:
        if isinstance(value, (str, int, float)) or (isinstance(value, list) and _is_flat(value)):
            attributes[key] = value
        elif value is not None:
            attributes[key] = orjson.dumps(value).decode()
    return attributes


def _is_flat(values: list[Any]) -> bool:
    return sum_of_numbers(values) is not None or all(isinstance(value, str) for value in values)


def _finite(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _member(number: int, members: Sequence[str]) -> str:
    return members[number] if 0 <= number < len(members) else members[0]


# ---------------------------------------------------------------------- protobuf


class _ProtobufMessage:
    __slots__ = ("_message",)

    def __init__(self, message: Any) -> None:
        self._message = message

    def text(self, name: str) -> str:
        text: str = getattr(self._message, name)
        return text

    def number(self, name: str) -> int:
        number: int = getattr(self._message, name)
        return number

    def identifier(self, name: str) -> str:
        identifier: bytes = getattr(self._message, name)
        return identifier.hex()

    def choice(self, name: str, members: Sequence[str]) -> str:
        return _member(getattr(self._message, name), members)

    def part(self, name: str) -> "_ProtobufMessage":
        return _ProtobufMessage(getattr(self._message, name))

    def parts(self, name: str) -> Iterator["_ProtobufMessage"]:
        return map(_ProtobufMessage, getattr(self._message, name))

    def attributes(self) -> Attributes:
        return _as_attributes((pair.key, _protobuf_value(pair.value)) for pair in self._message.attributes)


def trace_service() -> Any:
    """The generated module of OTLP's trace service."""
    try:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    except ImportError as error:
        raise ConfigurationError(
            "OTLP in protobuf needs the package opentelemetry-proto: run `pip install opentelemetry-proto`, "
            f"or let the exporter send {JSON}."
        ) from error
    return trace_service_pb2


def _read_protobuf(body: bytes) -> _ProtobufMessage:
    request = trace_service().ExportTraceServiceRequest
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped] # protobuf comes without its types

    try:
        return _ProtobufMessage(request.FromString(body))
    except (DecodeError, ValueError) as error:
        raise InvalidValue(
            f"The body is not an OTLP ExportTraceServiceRequest in protobuf ({error}); "
            f"declare JSON as Content-Type {JSON}, and compressed bodies by Content-Encoding."
        ) from error


def _protobuf_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value
    if kind == "double_value":
        return _finite(value.double_value)
    if kind == "array_value":
        return _protobuf_array(value.array_value.values)
    if kind == "kvlist_value":
        return {pair.key: _protobuf_value(pair.value) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind) if kind in ("int_value", "bool_value") else None


def _protobuf_array(items: Sequence[Any]) -> list[Any]:
    """The values of an array; token ids come by the thousand, so not each is asked for its kind.

    A field that is not zero or empty was set: if all of them are so, all values are of the kind of the first.
    """
    kind = items[0].WhichOneof("value") if items else None
    if kind in ("int_value", "double_value", "string_value"):
        values = list(map(operator.attrgetter(kind), items))
        if all(values) and math.isfinite(sum_of_numbers(values) or 0):
            return values
    return [_protobuf_value(item) for item in items]


# ---------------------------------------------------------------------- JSON


class _JsonMessage:
    __slots__ = ("_fields",)

    def __init__(self, fields: object) -> None:
        self._fields: dict[str, Any] = _checked(fields, dict, "OTLP message")

    def text(self, name: str) -> str:
        text: str = _field(self._fields, _camel_case(name), str)
        return text

    def number(self, name: str) -> int:
        value = self._fields.get(_camel_case(name))
        return 0 if value is None else whole_number(value, name, least=0, most=_LARGEST_UINT64)

    def identifier(self, name: str) -> str:
        return self.text(name).lower()

    def choice(self, name: str, members: Sequence[str]) -> str:
        value = self._fields.get(_camel_case(name))
        if value is None:
            return members[0]
        if isinstance(value, str):
            word = value.rpartition("_")[2]
            return word if word in members else members[0]
        return _member(whole_number(value, name, least=_SMALLEST_INT64, most=_LARGEST_INT64), members)

    def part(self, name: str) -> "_JsonMessage":
        return _JsonMessage(_field(self._fields, _camel_case(name), dict))

    def parts(self, name: str) -> Iterator["_JsonMessage"]:
        return map(_JsonMessage, _field(self._fields, _camel_case(name), list))

    def attributes(self) -> Attributes:
        return _as_attributes(_json_pairs(self._fields, "attributes", 0))


def _read_json(body: bytes) -> _JsonMessage:
    try:
        return _JsonMessage(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise InvalidValue(
            f"The body is not JSON ({error}); declare protobuf as Content-Type {PROTOBUF}, "
            "and compressed bodies by Content-Encoding."
        ) from error


@functools.cache
def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))


def _checked(value: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidValue(f"{name} is {quoted(value)}; OTLP JSON has {_KINDS[kind]} there.")
    return value


_KINDS = {dict: "an object", list: "an array", str: "text", bool: "true or false"}


def _field(fields: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """A field of that kind; an empty one if it is absent."""
    value = fields.get(name)
    return kind() if value is None else _checked(value, kind, name)


def _json_pairs(fields: dict[str, Any], name: str, depth: int) -> Iterator[tuple[str, Any]]:
    for pair in _field(fields, name, list):
        yield _field(_checked(pair, dict, name), "key", str), _json_value(pair.get("value"), depth)


def _json_value(value: Any, depth: int) -> Any:
    if depth > _DEEPEST_VALUE:
        raise InvalidValue(f"An attribute is nested more than {_DEEPEST_VALUE} levels deep; give a flatter value.")
    for name, content in {} if value is None else _checked(value, dict, "Attribute value").items():
        read = _VALUES.get(name)
        if read is not None and content is not None:
            return read(content, depth + 1)
    return None


def _json_array(content: Any, depth: int) -> list[Any]:
    return [_json_value(value, depth) for value in _field(_checked(content, dict, "arrayValue"), "values", list)]


def _json_mapping(content: Any, depth: int) -> dict[str, Any]:
    return dict(_json_pairs(_checked(content, dict, "kvlistValue"), "values", depth))


def _json_double(content: Any, depth: int) -> float | str:
    try:
        return _finite(float(content))
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"doubleValue is {quoted(content)}; give a number.") from error


def _json_bytes(content: Any, depth: int) -> str:
    """Base64 in the standard alphabet and padded, whichever way it was sent."""
    text = _checked(content, str, "bytesValue").replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64encode(base64.b64decode(text + "=" * (-len(text) % 4), validate=True)).decode()
    except ValueError as error:
        raise InvalidValue(f"bytesValue is {quoted(content)}; give base64.") from error


_VALUES: Mapping[str, Callable[[Any, int], Any]] = {
    "stringValue": lambda content, depth: _checked(content, str, "stringValue"),
    "boolValue": lambda content, depth: _checked(content, bool, "boolValue"),
    "intValue": lambda content, depth: whole_number(content, "intValue", least=_SMALLEST_INT64, most=_LARGEST_INT64),
    "doubleValue": _json_double,
    "bytesValue": _json_bytes,
    "arrayValue": _json_array,
    "kvlistValue": _json_mapping,
}
