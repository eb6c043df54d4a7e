"""Copies: what a store keeps is its own, and what it returns is the caller's own.

Back ends keep records by reference, so nothing they hand out may be the kept object. Spans are the exception of the
contract: they are copied once on the way in, and read as they are. Copies are made past pydantic's own `model_copy`, at
a third of its cost; this is the one module that knows how a model of pydantic lies in memory, and
`tests/store/test_copies.py` says what breaks when that changes.
"""

import functools
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel

from agentlightning.errors import InvalidValue
from agentlightning.store.claims import Claim
from agentlightning.store.operations import Unset
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    MetricPoint,
    PaginatedResult,
    RenewedWorker,
    Resource,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Run,
    Span,
    Worker,
)

ModelT = TypeVar("ModelT", bound=BaseModel)
ValueT = TypeVar("ValueT")

_KEPT = frozenset({str, int, float, bool, type(None), Unset, Span, Claim, AttemptedRollout})
"""What is passed on as it is: what cannot be changed, spans, and what is made of copies."""
_RECORDS = frozenset([Attempt, MetricPoint, PaginatedResult, ResourcesUpdate, Rollout, RolloutConfig])
_RECORDS |= {RenewedWorker, Run, Worker}
_set_fields, _set_names, _set_extra, _set_private = [
    BaseModel.__dict__[place].__set__
    for place in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
]


class _FieldNames(set[str]):
    """The names of all fields of a model, which its copies share: a set for each would be a third of a small span.

    Nothing can be taken out, which would change every other record too. Copies and pickles of it are plain sets.
    """

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("Records of a store share the set of their field names; change that of record.model_copy().")

    discard = remove = pop = clear = _refuse
    difference_update = intersection_update = symmetric_difference_update = _refuse
    __isub__ = __iand__ = __ixor__ = _refuse

    def __copy__(self) -> set[str]:
        return set(self)

    def __reduce__(self) -> tuple[type[set[str]], tuple[list[str]]]:
        return set, (list(self),)


@functools.cache
def field_names(model_type: type[BaseModel]) -> set[str]:
    """The set for `model_construct(_fields_set=…)` of models of which there are many."""
    return _FieldNames(model_type.model_fields)


def _built(model_type: type[ModelT], fields: dict[str, object], pattern: BaseModel) -> ModelT:
    """A model of these fields, unvalidated, with what else the pattern has."""
    model = object.__new__(model_type)
    extra = pattern.__pydantic_extra__
    _set_fields(model, fields)
    _set_names(model, field_names(model_type))
    _set_extra(model, dict(extra) if extra else extra)
    _set_private(model, pattern.__pydantic_private__)
    return model


@functools.cache
def _shape(model_type: type[BaseModel]) -> tuple[set[str], int, bool]:
    """The names of a model's fields, how many they are, and whether it takes others."""
    names = field_names(model_type)
    return names, len(names), model_type.model_config.get("extra") == "allow"


def built(model_type: type[ModelT], fields: dict[str, Any]) -> ModelT:
    """A model of the fields that it wrote as JSON, unvalidated; KeyError if they are not as many as it has."""
    names, count, takes_others = _shape(model_type)
    if len(fields) != count:
        raise KeyError(*(names ^ fields.keys()))
    model = object.__new__(model_type)
    _set_fields(model, fields)
    _set_names(model, names)
    _set_extra(model, {} if takes_others else None)
    _set_private(model, None)
    return model


def replaced(model: ModelT, **changes: object) -> ModelT:
    """A copy of a model with some fields changed, unvalidated."""
    return _built(type(model), {**model.__dict__, **changes}, model)


def attempted(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    """A rollout together with its latest attempt: copies, which leave the store as they are."""
    try:
        return _built(AttemptedRollout, {**_copied_fields(rollout), "attempt": _copied(attempt)}, rollout)
    except RecursionError as error:
        raise _nested() from error


def detached(value: ValueT) -> ValueT:
    """A copy of a value that shares no container, record or resource with it; other objects, and spans, stay."""
    if type(value) in _KEPT:
        return value
    try:
        copy: ValueT = _copied(value)
        return copy
    except RecursionError as error:
        raise _nested() from error


def _nested() -> InvalidValue:
    return InvalidValue("The value is nested too deeply, or contains itself; give a flatter value.")


def _copied_fields(record: BaseModel) -> dict[str, Any]:
    fields = record.__dict__.copy()
    for name, item in fields.items():
        if type(item) not in _KEPT:
            fields[name] = _copied(item)
    return fields


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: item if type(item) in _KEPT else _copied(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _KEPT else _copied(item) for item in value]
    if kind in _RECORDS:
        return _built(kind, _copied_fields(value), value)
    if kind is tuple:
        return tuple([_copied(item) for item in value])
    if kind is set:
        return set(value)
    if isinstance(value, Resource):
        copy = _built(kind, _copied(value.__dict__), value)
        _set_names(copy, set(value.__pydantic_fields_set__))
        return copy
    return value
