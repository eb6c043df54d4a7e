"""Values at the edge of the store: may this be kept, how large is it, and how is it copied.

A store must give back what it was given. JSON has no NaN, UTF-8 has no lone surrogates, and a database cannot hold an
arbitrary object, so such values are refused here, by name, before anything is written. Spans are the hot path: they are
looked at once, in one pass that also weighs them.
"""

import copy
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from agentlightning.errors import InvalidValue, PayloadTooLarge
from agentlightning.types import Attempt, AttemptedRollout, NamedResources, Rollout, Span, SpanContext
from agentlightning.types.attributes import sum_of_numbers

__all__ = [
    "as_json",
    "attempted",
    "check_json",
    "check_json_size",
    "check_size",
    "copied_span",
    "detached_value",
    "own_resources",
    "replaced",
    "span_as_json",
    "weigh_span",
]

ModelT = TypeVar("ModelT", bound=BaseModel)

_BYTES_OF_A_SPAN = 2400
"""At least what a span's own object, ids, times and empty parts take; the rest is weighed."""
_BYTES_OF_A_CONTEXT = 1200
_MOST_ID_CHARACTERS = 64
_BYTES_OF_A_NUMBER = 56
_BYTES_OF_A_STRING = 120
_BYTES_OF_A_CHARACTER = 8  # as text and, once it was encoded, beside it as UTF-8
_BYTES_OF_A_SEQUENCE = 120
_BYTES_OF_A_MAPPING_SLOT = 140
_WORST_ESCAPE = 6
"""A control character is one byte in memory and six in JSON."""

_IMMUTABLE = frozenset({str, int, float, bool, type(None)})
_TOO_DEEP = "{where} is nested too deeply, or contains itself; give a flatter value."
_SPAN_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
_JSON_OPTIONS = _SPAN_OPTIONS | orjson.OPT_NON_STR_KEYS  # keys that are subclasses of text; slower
_LARGEST_INTEGER = 2**64 - 1
_SMALLEST_INTEGER = -(2**63)

# The slots of a model, past its own checks; a fifth of what a copy costs is saved against `object.__setattr__`.
_new = object.__new__
_set_fields = BaseModel.__dict__["__dict__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_names = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__


# ---------------------------------------------------------------------- copies


def replaced(model: ModelT, **changes: Any) -> ModelT:
    """A copy of a model with some fields changed, unvalidated; what `model_copy` does, at a third of its cost."""
    return _built(type(model), {**model.__dict__, **changes}, model)


def attempted(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    """The rollout together with its latest attempt."""
    return _built(AttemptedRollout, {**rollout.__dict__, "attempt": attempt}, rollout)


def copied_span(span: Span) -> Span:
    """A span whose fields and attribute mapping are new; what lies deeper counts as immutable."""
    return _built(type(span), {**span.__dict__, "attributes": dict(span.attributes)}, span)


@functools.cache
def _all_fields(model_type: type[BaseModel]) -> Callable[[], set[str]]:
    """Makes a set of the names of all fields; each copy has one of its own, for its owner may change it."""
    return set(model_type.model_fields).copy


def _built(model_type: type[ModelT], fields: dict[str, Any], pattern: BaseModel) -> ModelT:
    model = _new(model_type)
    extra = pattern.__pydantic_extra__
    _set_fields(model, fields)
    _set_extra(model, dict(extra) if extra else extra)
    _set_names(model, _all_fields(model_type)())
    _set_private(model, pattern.__pydantic_private__)
    return model


def detached_value(value: Any) -> Any:
    """A copy of the containers in a value; objects of other types are opaque and passed on as they are."""
    if type(value) in _IMMUTABLE:
        return value
    try:
        return _copied(value)
    except RecursionError as error:
        raise InvalidValue(_TOO_DEEP.format(where="The value")) from error


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    if kind is tuple:
        return tuple(_copied(item) for item in value)
    return set(value) if kind is set else value


def own_resources(resources: NamedResources) -> NamedResources:
    """Deep copies of resources, at a fifth of what `model_copy(deep=True)` costs."""
    return {name: _own_resource(resource) for name, resource in resources.items()}


def _own_resource(resource: ModelT) -> ModelT:
    own = type(resource).__new__(type(resource))
    _set_fields(own, _deeply_copied(resource.__dict__))
    _set_extra(own, _deeply_copied(resource.__pydantic_extra__))
    _set_names(own, set(resource.__pydantic_fields_set__))
    _set_private(own, _deeply_copied(resource.__pydantic_private__))
    return own


def _deeply_copied(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: _deeply_copied(item) for key, item in value.items()}
    if kind is list:
        return [_deeply_copied(item) for item in value]
    return copy.deepcopy(value)


# ---------------------------------------------------------------------- JSON


def check_json(value: Any, where: str) -> None:
    """Refuse what JSON would not give back as it was."""
    try:
        _check_json(value, where)
    except RecursionError as error:
        raise InvalidValue(_TOO_DEEP.format(where=where)) from error


def _check_json(value: Any, where: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        _check_integer(value, where)
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
        if not _are_storable_numbers(value):
            for index, item in enumerate(value):
                _check_json(item, f"{where}[{index}]")
    else:
        raise InvalidValue(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; give text, numbers, lists or mappings."
        )


def as_json(value: Any, where: str) -> bytes:
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
    if extra or fields["events"] or fields["links"] or resource.attributes:
        weigh_span(span)
    fields["status"] = _plain(status)  # here, because a call back from orjson costs more
    fields["resource"] = resource.__dict__
    try:
        body = orjson.dumps(fields, _plain, _SPAN_OPTIONS)
    except TypeError as error:
        weigh_span(span)
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
        weigh_span(span)
    return body


_NULLS = re.compile(b"null").findall


def _plain(value: Any) -> Any:
    """What orjson does not know: our models, and number types that subclass the built-in ones."""
    if hasattr(value, "__pydantic_extra__"):
        extra = value.__pydantic_extra__
        return {**value.__dict__, **extra} if extra else value.__dict__
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _are_storable_numbers(values: Sequence[Any]) -> bool:
    """Whether they are numbers and JSON holds them all; a quick answer, which for odd ones may be a wrong no."""
    total = sum_of_numbers(values)
    if type(total) is float:
        return math.isfinite(total)
    return total is not None and _SMALLEST_INTEGER <= total <= _LARGEST_INTEGER


def _check_text(text: str, where: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue(
                f"{where} holds a lone surrogate at position {error.start}, which is not text; "
                "decode the bytes it came from with errors='replace'."
            ) from error


def _check_integer(number: int, where: str) -> None:
    if not _SMALLEST_INTEGER <= number <= _LARGEST_INTEGER:
        raise InvalidValue(f"{where} is an integer of more than 64 bits; give it as text.")


def _check_number(number: float, where: str) -> None:
    if not math.isfinite(number):
        raise InvalidValue(f"{where} is {number}, which JSON cannot hold; give a finite number, or leave it out.")


# ---------------------------------------------------------------------- spans


def weigh_span(span: Span) -> int:
    """Check a span's values and give an upper estimate of the bytes it takes in memory."""
    fields = span.__dict__
    name, status, resource = fields["name"], fields["status"], fields["resource"]
    size = _BYTES_OF_A_SPAN + _weigh_attributes(fields["attributes"], name)
    texts = f"{name}{fields['span_id']}{fields['trace_id']}{fields['parent_id']}{status.description}"
    size += len(texts) if texts.isascii() else _weigh_text(texts, f"Span {name!a}")
    if not math.isfinite((fields["start_time"] or 0.0) + (fields["end_time"] or 0.0)):
        _check_number(fields["start_time"] or 0.0, f"The start time of span '{name}'")
        _check_number(fields["end_time"] or 0.0, f"The end time of span '{name}'")
    context, parent = fields["context"], fields["parent"]
    if (
        span.__pydantic_extra__
        or status.__pydantic_extra__
        or fields["events"]
        or fields["links"]
        or not (context is None or _is_plain_context(context))
        or not (parent is None or _is_plain_context(parent))
        or not resource.schema_url.isascii()
    ):
        return size + _weigh_parts(span)
    size += _BYTES_OF_A_CONTEXT * ((context is not None) + (parent is not None)) + len(resource.schema_url)
    return size + _weigh_attributes(resource.attributes, name) if resource.attributes else size


def _is_plain_context(context: SpanContext) -> bool:
    """Whether it is no more than two ids in text that needs no closer look, as almost all are."""
    return (
        not context.__pydantic_extra__
        and not context.trace_state
        and len(context.trace_id) + len(context.span_id) <= _MOST_ID_CHARACTERS
        and context.trace_id.isascii()
        and context.span_id.isascii()
    )


def _weigh_attributes(attributes: Mapping[str, Any], span_name: str) -> int:
    size = len(attributes) * (_BYTES_OF_A_MAPPING_SLOT + _BYTES_OF_A_STRING)
    for key, value in attributes.items():
        kind = type(value)
        if kind is str and value.isascii():
            size += len(value)
        elif kind is float and math.isfinite(value):
            size += _BYTES_OF_A_NUMBER
        elif kind is list and _are_storable_numbers(value):
            size += _BYTES_OF_A_SEQUENCE + len(value) * _BYTES_OF_A_NUMBER
        elif kind is not int or not _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER:
            size += _weigh_value(value, f"Attribute '{key}' of span '{span_name}'")
    names = "".join(attributes)
    if not names.isascii():
        _check_text(names, f"The attribute names of span '{span_name}'")
    return size


def _weigh_value(value: Any, where: str) -> int:
    """A value that is not one of the usual kinds."""
    if isinstance(value, str):
        return _weigh_text(value, where)
    if isinstance(value, (list, tuple)):
        return _weigh_sequence(value, where)
    check_json(value, where)
    return sys.getsizeof(value)


def _weigh_sequence(values: list[Any] | tuple[Any, ...], where: str) -> int:
    if _are_storable_numbers(values):
        return _BYTES_OF_A_SEQUENCE + len(values) * _BYTES_OF_A_NUMBER
    check_json(values, where)
    return _BYTES_OF_A_SEQUENCE + sum(_BYTES_OF_A_STRING + _weigh_text(str(value), where) for value in values)


def _weigh_text(text: str, where: str) -> int:
    _check_text(text, where)
    return len(text) if text.isascii() else len(text) * _BYTES_OF_A_CHARACTER


def _weigh_parts(span: Span) -> int:
    """Contexts, events, links, resource and extra fields, checked the plain way and weighed by their JSON."""
    parts = span.model_dump(include=_PARTS) | (span.__pydantic_extra__ or {})
    return _BYTES_OF_A_NUMBER * len(as_json(parts, f"Span '{span.name}'"))


_PARTS = {"context", "parent", "status", "events", "links", "resource"}


def check_size(span: Span, size: int, limit: int) -> None:
    """Refuse a span whose JSON is above the limit; `size` is its weight in memory."""
    if size * _WORST_ESCAPE > limit:
        check_json_size(span, len(span_as_json(span)), limit)


def check_json_size(span: Span, size: int, limit: int) -> None:
    """Refuse a span whose JSON has this size."""
    if size > limit:
        raise PayloadTooLarge(
            f"Span '{span.name}' takes {size} bytes as JSON, above max_span_bytes={limit}; "
            "store large payloads elsewhere and keep a reference in the span."
        )
