"""Values at the edge of the store: may this be kept, how is it written, and how large is it.

A store must give back what it was given. JSON has no NaN, UTF-8 has no lone surrogates, and a database cannot hold an
arbitrary object, so such values are refused here, by name, before anything is written. Spans are the hot path: they are
written as JSON once, and looked at value by value only where that JSON is odd.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel

from agentlightning.errors import InvalidValue, PayloadTooLarge
from agentlightning.store.copies import built
from agentlightning.types import Event, Link, OtelResource, Rollout, Span, SpanContext, TraceStatus
from agentlightning.types.attributes import sum_of_numbers

_BYTES_OF_A_ROLLOUT = 2300
"""What a rollout takes without input, metadata and output, its places in the store and in the queue included."""
_BYTES_OF_A_NUMBER = 32
_BYTES_OF_A_STRING = 56  # and one for each ASCII letter
_LARGEST_NUMBER_KEPT_ONCE = 256  # by the interpreter, for the whole process

_SPAN_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
_JSON_OPTIONS = _SPAN_OPTIONS | orjson.OPT_NON_STR_KEYS  # keys that are subclasses of text; slower
_LARGEST_INTEGER = 2**64 - 1
_SMALLEST_INTEGER = -(2**63)

# ---------------------------------------------------------------------- JSON


def check_json(value: object, where: str) -> None:
    """Refuse what JSON would not give back as it was."""
    try:
        _check_json(value, where)
    except RecursionError as error:
        message = f"{where} is nested too deeply, or contains itself; give a flatter value."
        raise InvalidValue(message) from error


def _check_json(value: object, where: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if not _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER:
            raise InvalidValue(f"{where} is an integer of more than 64 bits; give it as text.")
    elif isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, float):
        _check_number(value, where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidValue(f"{where} has the key {key!r}; keys must be strings to be stored as JSON.")
            _check_text(key, where)
            _check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        if _storable_sum(value) is None:
            for index, item in enumerate(value):
                _check_json(item, f"{where}[{index}]")
    else:
        way = "its model_dump()" if isinstance(value, BaseModel) else "text, numbers, lists or mappings"
        raise InvalidValue(f"{where} is of type {type(value).__name__}, which JSON cannot hold; give {way}.")


def as_json(value: object, where: str) -> bytes:
    """A value as JSON, refused by name if it would not come back as it was."""
    check_json(value, where)
    try:
        return orjson.dumps(value, _plain, _JSON_OPTIONS)
    except TypeError as error:  # nesting beyond orjson's depth
        raise InvalidValue(f"{where} cannot be stored as JSON: {error}.") from error


def span_as_json(span: Span) -> bytes:
    """A span as JSON; orjson over the models' own fields is three times as fast as their serialiser.

    orjson refuses lone surrogates, but writes null for NaN: a span that shows more nulls than it has empty fields is
    looked at value by value.
    """
    fields = span.__dict__.copy()
    status, resource, extra = fields["status"], fields["resource"], span.__pydantic_extra__
    if extra:
        fields.update(extra)
    if extra or fields["events"] or fields["links"]:
        check_span(span)
    fields["status"] = _plain(status)  # here, because a call back from orjson costs more
    fields["resource"] = resource.__dict__
    try:
        body = orjson.dumps(fields, _plain, _SPAN_OPTIONS)
    except TypeError as error:
        check_span(span)
        try:
            body = orjson.dumps(fields, _plain, _JSON_OPTIONS)
        except TypeError:
            raise InvalidValue(f"Span '{span.name}' cannot be stored as JSON: {error}.") from error
    empty_fields = (
        (status.description is None)
        + (fields["parent_id"] is None)
        + (fields["start_time"] is None)
        + (fields["end_time"] is None)
        + (fields["context"] is None)
        + (fields["parent"] is None)
    )
    if len(_NULLS(body)) > empty_fields:
        check_span(span)
    return body


_NULLS = re.compile(b"null").findall


def span_of_json(body: bytes) -> Span:
    """The span that `span_as_json` wrote, without checking it again; at a third of the cost of a validation."""
    fields = orjson.loads(body)
    try:
        fields["status"] = built(TraceStatus, fields["status"])
        fields["resource"] = built(OtelResource, fields["resource"])
        for name in ("context", "parent"):
            if fields[name] is not None:
                fields[name] = built(SpanContext, fields[name])
        if fields["events"]:
            fields["events"] = [built(Event, event) for event in fields["events"]]
        for link in fields["links"]:
            link["context"] = built(SpanContext, link["context"])
        if fields["links"]:
            fields["links"] = [built(Link, link) for link in fields["links"]]
        return built(Span, fields)
    except KeyError:  # it has fields beside ours, or is of a release that wrote fewer
        return Span.model_validate(orjson.loads(body))


def _plain(value: object) -> object:
    """What orjson does not know: our models, and number types that subclass the built-in ones."""
    if hasattr(value, "__pydantic_extra__"):
        extra = value.__pydantic_extra__
        return {**value.__dict__, **extra} if extra else value.__dict__
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _storable_sum(values: Sequence[object]) -> float | None:
    """The sum of numbers that JSON holds all; a quick answer, which for odd ones may be a wrong None."""
    total = sum_of_numbers(values)
    if type(total) is float:
        return total if math.isfinite(total) else None
    return total if total is not None and _SMALLEST_INTEGER <= total <= _LARGEST_INTEGER else None


def _check_text(text: str, where: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue(
                f"{where} holds a lone surrogate at position {error.start}, which is not text; "
                "decode the bytes it came from with errors='replace'."
            ) from error


def _check_number(number: float, where: str) -> None:
    if not math.isfinite(number):
        raise InvalidValue(f"{where} is {number}, which JSON cannot hold; give a finite number, or leave it out.")


# ---------------------------------------------------------------------- weights


def weigh_rollout(rollout: Rollout) -> int:
    """Estimate the bytes that a rollout takes in memory, its input, metadata and output included."""
    try:
        size = _BYTES_OF_A_ROLLOUT + weigh_value(rollout.input) + weigh_value(rollout.metadata)
        return size if rollout.output is None else size + weigh_value(rollout.output)
    except RecursionError:  # an object of the user's that contains itself; a memory store keeps any object
        return _BYTES_OF_A_ROLLOUT


def weigh_value(value: Any) -> int:
    """Estimate the bytes that a value takes with all that hangs on it; what hangs on opaque objects is not seen."""
    kind = type(value)
    if kind is str:
        return _BYTES_OF_A_STRING + len(value) if value.isascii() else int(sys.getsizeof(value))
    if value is None or kind is bool or (kind is int and 0 <= value <= _LARGEST_NUMBER_KEPT_ONCE):
        return 0
    if kind is int or kind is float:
        return _BYTES_OF_A_NUMBER
    if kind is dict:
        return sys.getsizeof(value) + sum(map(weigh_value, value)) + sum(map(weigh_value, value.values()))
    if kind is list or kind is tuple:
        total = sum_of_numbers(value)
        if total is not None:
            return _weigh_numbers(value, total)
        return sys.getsizeof(value) + sum(map(weigh_value, value))
    if kind is set:
        return sys.getsizeof(value) + sum(map(weigh_value, value))
    if isinstance(value, BaseModel):
        names = value.__pydantic_fields_set__
        size = sum(map(sys.getsizeof, (value, value.__dict__, names))) + sum(map(weigh_value, value.__dict__.values()))
        return size + weigh_value(value.__pydantic_extra__ or None)
    return sys.getsizeof(value, 0)


def _weigh_numbers(values: Sequence[object], total: float) -> int:
    """Numbers in a list; by their mean, all are small ones that Python keeps once, or each is an object of its own."""
    count = len(values)
    is_apart = type(total) is float or total > _LARGEST_NUMBER_KEPT_ONCE * count
    return sys.getsizeof(values) + (_BYTES_OF_A_NUMBER * count if is_apart else 0)


# ---------------------------------------------------------------------- spans


def check_span(span: Span) -> None:
    """Refuse, by name, what JSON would not give back as it was."""
    name, fields = span.name, span.__dict__
    texts = f"{name}{fields['span_id']}{fields['trace_id']}{fields['parent_id']}{span.status.description}"
    _check_text(texts, f"Span {name!a}")
    _check_number(fields["start_time"] or 0.0, f"The start time of span '{name}'")
    _check_number(fields["end_time"] or 0.0, f"The end time of span '{name}'")
    for key, value in span.attributes.items():
        _check_text(key, f"The attribute names of span '{name}'")
        check_json(value, f"Attribute '{key}' of span '{name}'")
    check_json(span.model_dump(include=_PARTS) | (span.__pydantic_extra__ or {}), f"Span '{name}'")


_PARTS = {"context", "parent", "status", "events", "links", "resource"}


def check_json_size(span: Span, size: int, limit: int) -> None:
    """Refuse a span whose JSON has this size."""
    if size > limit:
        raise PayloadTooLarge(
            f"Span '{span.name}' takes {size} bytes as JSON, above max_span_bytes={limit}; "
            "store large payloads elsewhere and keep a reference in the span."
        )
