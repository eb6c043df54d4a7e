"""The messages of OTLP traces, read through the same models from objects of protobuf and from parsed JSON.

JSON is OTLP's own dialect of it: ids are hexadecimal, 64-bit numbers may be text, enumerations may be numbers or names,
unknown fields are not looked at, and null is the same as absent. It needs no extra package; protobuf does.

Our attributes hold text, numbers, booleans and flat lists. Of OTLP's other values, bytes become base64, NaN and the
infinities become the words OTLP JSON has for them, mappings and lists of several kinds become JSON text, and an
attribute without a value is left out.
"""

import base64
import math
import operator
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import (
    AliasChoices,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from agentlightning.errors import ConfigurationError, InvalidValue
from agentlightning.types.attributes import Attributes, sum_of_numbers

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
KINDS: Final = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_STATUS_CODES: Final = ("UNSET", "OK", "ERROR")
_LARGEST_INT64, _LARGEST_UINT64 = 2**63 - 1, 2**64 - 1
_DEEPEST_VALUE = 64
_LONGEST_QUOTE = 80


def parse_body(body: bytes, media_type: str) -> Any:
    """A body as parsed JSON, or as a message of protobuf."""
    if format_of(media_type) == JSON:
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise InvalidValue(
                f"The body is not JSON ({error}); declare protobuf as Content-Type {PROTOBUF}, "
                "and compressed bodies by Content-Encoding."
            ) from error
    request = trace_service().ExportTraceServiceRequest
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped] # protobuf comes without its types

    try:
        return request.FromString(body)
    except (DecodeError, ValueError) as error:
        raise InvalidValue(
            f"The body is not an OTLP ExportTraceServiceRequest in protobuf ({error}); "
            f"declare JSON as Content-Type {JSON}, and compressed bodies by Content-Encoding."
        ) from error


def format_of(media_type: str) -> str:
    name = media_type.partition(";")[0].strip().lower()
    if name not in (PROTOBUF, JSON):
        raise InvalidValue(f"Content type {quoted(media_type)} is not OTLP; send {PROTOBUF} or {JSON}.")
    return name


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


def quoted(value: object) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"


def reason_of(error: ValidationError) -> str:
    """The first thing that is wrong with a message."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "The message"
    return f"{place} is {quoted(first['input'])}; {first['msg'].removeprefix('Value error, ')}."


# ---------------------------------------------------------------------- values


def whole_number(value: object, least: int = 0, most: int = _LARGEST_UINT64) -> int:
    """A number that may be written as text."""
    number = value
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,20}", value, re.ASCII):
        number = int(value)
    if isinstance(value, float) and value.is_integer():
        number = int(value)
    if isinstance(number, int) and not isinstance(number, bool) and least <= number <= most:
        return number
    raise InvalidValue(f"give a whole number from {least} to {most}")


def _identifier(value: object) -> str:
    """An id as text in lower case, empty if it is absent or all zeros."""
    text = value.hex() if isinstance(value, bytes) else value
    if not isinstance(text, str) or not re.fullmatch("[0-9a-fA-F]*", text, re.ASCII):
        raise InvalidValue("give hexadecimal digits")
    return text.lower() if text.strip("0") else ""


def _member(value: object, members: Sequence[str]) -> str:
    """The member of an enumeration, by its number or name; one that is not known is the first."""
    if isinstance(value, str):
        name = value.rpartition("_")[2]
        return name if name in members else members[0]
    number = whole_number(value, -_LARGEST_INT64)
    return members[number] if 0 <= number < len(members) else members[0]


def _attributes(pairs: object) -> Attributes:
    """Attributes, with what ours cannot hold as text; of several with one name the last counts."""
    attributes: Attributes = {}
    for key, value in (
        _json_pairs(pairs, 0) if isinstance(pairs, (list, dict, str, int, float)) else _protobuf_pairs(pairs)
    ):
        if isinstance(value, (str, int, float)) or (isinstance(value, list) and _is_flat(value)):
            attributes[key] = value
        elif value is not None:
            attributes[key] = orjson.dumps(value).decode()
    return attributes


def _is_flat(values: list[object]) -> bool:
    return sum_of_numbers(values) is not None or all(isinstance(value, str) for value in values)


def _finite(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _protobuf_pairs(pairs: Any) -> list[tuple[str, object]]:
    return [(pair.key, _protobuf_value(pair.value)) for pair in pairs]


def _protobuf_value(value: Any) -> object:
    kind = value.WhichOneof("value")
    if kind == "double_value":
        return _finite(value.double_value)
    if kind == "array_value":
        return _protobuf_array(value.array_value.values)
    if kind == "kvlist_value":
        return dict(_protobuf_pairs(value.kvlist_value.values))
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind) if kind in ("string_value", "int_value", "bool_value") else None


def _protobuf_array(items: Sequence[Any]) -> list[object]:
    """The values of an array; token ids come by the thousand, so not each is asked for its kind.

    A field that is not zero or empty was set: if all of them are so, all values are of the kind of the first.
    """
    kind = items[0].WhichOneof("value") if items else None
    if kind in ("int_value", "double_value", "string_value"):
        values = list(map(operator.attrgetter(kind), items))
        if all(values) and math.isfinite(sum_of_numbers(values) or 0):
            return values
    return [_protobuf_value(item) for item in items]


ValueT = TypeVar("ValueT")


def _checked(value: object, kind: type[ValueT]) -> ValueT:
    if not isinstance(value, kind):
        raise InvalidValue(f"{quoted(value)} stands where OTLP JSON has a {kind.__name__}")
    return value


def _json_pairs(pairs: object, depth: int) -> list[tuple[str, object]]:
    entries = [_checked(pair, dict) for pair in _checked(pairs, list)]
    return [(_checked(pair.get("key", ""), str), _json_value(pair.get("value"), depth)) for pair in entries]


def _json_value(value: object, depth: int) -> object:
    """The value that the first known field of an object holds."""
    if depth > _DEEPEST_VALUE:
        raise InvalidValue(f"an attribute is nested more than {_DEEPEST_VALUE} levels deep")
    for kind, content in _checked({} if value is None else value, dict).items():
        if content is None:
            continue
        if kind == "stringValue":
            return _checked(content, str)
        if kind == "boolValue":
            return _checked(content, bool)
        if kind == "intValue":
            return whole_number(content, -_LARGEST_INT64 - 1, _LARGEST_INT64)
        if kind == "doubleValue":
            return _finite(float(content if isinstance(content, (int, float)) else _checked(content, str)))
        if kind == "bytesValue":  # base64 in either alphabet, padded or not
            text = _checked(content, str).replace("-", "+").replace("_", "/").rstrip("=")
            return base64.b64encode(base64.b64decode(text + "=" * (-len(text) % 4), validate=True)).decode()
        if kind == "arrayValue":
            items = _checked(_checked(content, dict).get("values") or [], list)
            return [_json_value(item, depth + 1) for item in items]
        if kind == "kvlistValue":
            return dict(_json_pairs(_checked(content, dict).get("values") or [], depth + 1))
    return None


# ---------------------------------------------------------------------- messages


def _as_list(value: Any) -> object:
    """Protobuf's containers as lists; what JSON holds stays as it is."""
    return value if isinstance(value, (list, dict, str, int, float)) else list(value)


Number = Annotated[int, BeforeValidator(whole_number)]
Identifier = Annotated[str, BeforeValidator(_identifier)]
AttributePairs = Annotated[dict[str, Any], BeforeValidator(_attributes)]
ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], BeforeValidator(_as_list)]


class _Message(BaseModel):
    """A message of OTLP, from parsed JSON or an object of protobuf; absent fields have protobuf's defaults."""

    model_config = ConfigDict(
        from_attributes=True,
        alias_generator=AliasGenerator(validation_alias=lambda name: AliasChoices(to_camel(name), name)),
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: object) -> object:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class EventMessage(_Message):
    name: StrictStr = ""
    time_unix_nano: Number = 0
    attributes: AttributePairs = {}


class LinkMessage(_Message):
    trace_id: Identifier = ""
    span_id: Identifier = ""
    trace_state: StrictStr = ""
    flags: Number = 0
    attributes: AttributePairs = {}


class _Status(_Message):
    code: Annotated[str, BeforeValidator(lambda value: _member(value, _STATUS_CODES))] = _STATUS_CODES[0]
    message: StrictStr = ""


class SpanMessage(_Message):
    name: StrictStr = ""
    trace_id: Identifier = ""
    span_id: Identifier = ""
    parent_span_id: Identifier = ""
    trace_state: StrictStr = ""
    flags: Number = 0
    kind: Annotated[str, BeforeValidator(lambda value: _member(value, KINDS))] = KINDS[0]
    start_time_unix_nano: Number = 0
    end_time_unix_nano: Number = 0
    attributes: AttributePairs = {}
    events: Items[EventMessage] = []
    links: Items[LinkMessage] = []
    status: _Status = _Status()


class _Scope(_Message):
    name: StrictStr = ""
    version: StrictStr = ""
    attributes: AttributePairs = {}


class ScopeSpansMessage(_Message):
    scope: _Scope = _Scope()
    schema_url: StrictStr = ""
    spans: Items[Any] = []


class _Resource(_Message):
    attributes: AttributePairs = {}


class _ResourceSpans(_Message):
    resource: _Resource = _Resource()
    schema_url: StrictStr = ""
    scope_spans: Items[ScopeSpansMessage] = []


class TraceRequest(_Message):
    resource_spans: Items[_ResourceSpans] = []
