"""How arguments and results of operations become JSON, and JSON becomes them again.

One `OperationCodec` per operation, built from its declaration. What arrives is validated once, as a whole, so that
every mistake in a request is named; what is sent is refused by name if JSON would not give it back. Spans are the hot
path and are encoded by the store's own encoder.
"""

import dataclasses
import functools
import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from typing_extensions import NotRequired, Required, TypedDict

from agentlightning.errors import InvalidQuery, InvalidValue
from agentlightning.store.base import LightningStore
from agentlightning.store.http.failures import BadArguments
from agentlightning.store.operations import Operation, operations_of
from agentlightning.store.values import as_json, span_as_json
from agentlightning.types import EnqueueRolloutRequest, Notice, PaginatedResult, Span, Task
from agentlightning.utils.json_values import MOST_LEVELS, is_encodable

_MAKES_ROLLOUTS = frozenset({"start_rollout", "enqueue_rollout", "enqueue_many_rollouts"})

MOST_FRAME_BYTES = 1024 * 1024
"""About how large a frame of the live channel becomes before another is begun."""
_LONG_NUMBER = re.compile(rb"\d{19}")
_MOST_DIGITS = 20
_SEARCHED_BYTES = 64 * 1024
_SEARCHED_STEP = _SEARCHED_BYTES - _MOST_DIGITS
_COUNTED_BYTES = 8 * 1024
PART_BYTES = 64 * 1024
"""About how much of a long answer is encoded at a time."""
_SCALARS = (str, int, float, bool, type(None))


def parse_json(text: bytes | str) -> Any:
    """JSON as plain values; `InvalidValue` for anything else."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidValue(f"The body is not JSON: {error}.") from error


def parse_foreign_json(text: bytes) -> Any:
    """JSON that somebody else wrote: integers beyond 64 bits, which would become floats, are refused."""
    parsed = parse_json(text)
    # Piece by piece, because a search keeps all other threads waiting.
    if any(_LONG_NUMBER.search(text, start, start + _SEARCHED_BYTES) for start in range(0, len(text), _SEARCHED_STEP)):
        try:
            json.loads(text, parse_int=_checked_integer)
        except RecursionError:
            raise too_deep() from None
    return parsed


def _checked_integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS or not -(2**63) <= int(digits) < 2**64:
        raise InvalidValue(f"The body holds {digits[:40]}, an integer of more than 64 bits; send it as text.")
    return int(digits)


def is_deep(text: bytes, parsed: object) -> bool:
    """Whether no encoder could send this again: once stored, it would break every query that finds it."""
    # In a short text brackets are counted faster than values are encoded, and few of them cannot be deep.
    is_flat = len(text) <= _COUNTED_BYTES and text.count(b"[") + text.count(b"{") < MOST_LEVELS
    return not is_flat and not is_encodable(parsed)


def too_deep() -> InvalidValue:
    return InvalidValue(f"The request is nested more than {MOST_LEVELS} levels deep; send a flatter one.")


def plain_value(value: object, where: str) -> Any:
    """Models, data classes, sets, dates and the like as what JSON holds; containers are copied."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, BaseModel):
        return plain_value(value.model_dump(serialize_as_any=True), where)
    if isinstance(value, Mapping):
        return {key: plain_value(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_value(item, where) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_value(dataclasses.asdict(value), where)
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{where} holds a {type(value).__name__}, which cannot be sent as JSON.") from error


class OperationCodec:
    """The JSON of one operation."""

    def __init__(self, op: Operation) -> None:
        self.op = op

    @functools.cached_property
    def arguments(self) -> TypeAdapter[dict[str, Any]]:
        """Validates the arguments of a call given as one object; those left out stay out."""
        fields: dict[str, Any] = {}
        for name, hint in self.op.hints.items():
            is_required = self.op.signature.parameters[name].default is inspect.Parameter.empty
            shape_of_value = dict[str, Any] if name == self.op.loose else _relaxed(hint)
            fields[name] = Required[shape_of_value] if is_required else NotRequired[shape_of_value]
        make_shape: Any = TypedDict  # mypy knows only shapes that stand in the code
        words = self.op.name.title().replace("_", "")
        shape = make_shape(f"{words}Request", fields)
        shape.__pydantic_config__ = ConfigDict(extra="forbid")
        return TypeAdapter(shape)

    def encode_argument(self, name: str, value: object) -> bytes:
        if type(value) is str and value.isascii():  # as most; nothing in it could be refused
            return orjson.dumps(value)
        hint = self.op.hints[name]
        if hint is Span:
            return _encoded_span(value)
        if hint == Sequence[Span] and isinstance(value, Sequence):
            return encode_many([_encoded_span(span) for span in value])
        return _encoded(value, f"Argument '{name}'")

    def encode_arguments(self, arguments: Mapping[str, object]) -> bytes:
        if self.op.name in _MAKES_ROLLOUTS:
            arguments = _without_tasks(arguments)
        parts = [b'"%b":%b' % (name.encode(), self.encode_argument(name, value)) for name, value in arguments.items()]
        return b"{" + b",".join(parts) + b"}"

    def decode_arguments(self, given: object) -> dict[str, Any]:
        """Arguments by name; `BadArguments` names everything that does not fit."""
        try:
            return self.arguments.validate_python(given)
        except ValidationError as error:
            raise BadArguments(InvalidValue if self.op.mutates else InvalidQuery, error) from error

    def encode_result(self, result: object) -> bytes:
        if isinstance(result, Span):
            return span_as_json(result)
        if isinstance(result, PaginatedResult) and result.items:
            return b"".join(encode_page(result))
        return self.op.result.dump_json(result, serialize_as_any=True)

    def encode_brief(self, result: object) -> bytes:
        """The result, told in short if the caller knows the rest."""
        return self.encode_result(result) if self.op.echoes is None else orjson.dumps(self.op.brief(result))

    def decode_brief(self, given: object, arguments: Mapping[str, object]) -> Any:
        """A result from parsed JSON, which may tell in short what the arguments hold."""
        return self.op.result.validate_python(given) if self.op.echoes is None else self.op.expand(given, arguments)


@functools.cache
def codec_of(name: str) -> OperationCodec:
    """The codec of the operation of that name."""
    return OperationCodec(operations_of(LightningStore)[name])


def prepare_codecs() -> None:
    """Build now what the first calls of hot operations would build; processes forked later share it."""
    for op in operations_of(LightningStore).values():
        if op.hot:
            _ = codec_of(op.name).arguments, op.result


def _relaxed(hint: object) -> object:
    """A type whose closed sets of words are open: which words fit is the store's to say, in better words."""
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_relaxed(member) for member in get_args(hint))]  # noqa: UP007 # built at run time
    if get_origin(hint) is Sequence:
        return list[_relaxed(get_args(hint)[0])]  # type: ignore[misc] # built at run time; what JSON gives, checked faster
    return hint


def _without_tasks(arguments: Mapping[str, Any]) -> Mapping[str, object]:
    """Arguments in which a `Task` as input, which JSON would make a mapping, is what the store makes of it."""
    if type(task := arguments.get("input")) is Task:
        options = (arguments.get(name) for name in ("mode", "resources_id", "metadata"))
        return {**arguments, **task.as_rollout_fields(*options)}
    if "rollouts" not in arguments:
        return arguments
    return {"rollouts": [_without_task(request) for request in arguments["rollouts"]]}


def _without_task(request: object) -> object:
    if not isinstance(request, EnqueueRolloutRequest) or type(request.input) is not Task:
        return request
    fields = request.input.as_rollout_fields(request.mode, request.resources_id, request.metadata)
    return request.model_copy(update=fields)


def _encoded_span(value: object) -> bytes:
    if not isinstance(value, Span):
        raise InvalidValue(f"Expected a Span, not a {type(value).__name__}.")
    return span_as_json(value)


def _encoded(value: object, where: str) -> bytes:
    try:
        return as_json(value, where)
    except InvalidValue:
        return as_json(plain_value(value, where), where)


def encode_many(parts: Sequence[bytes]) -> bytes:
    """A JSON array of what is JSON already."""
    return b"[" + b",".join(parts) + b"]"


def encode_items(items: Sequence[Any]) -> Iterator[bytes]:
    """The parts of a JSON array of models; each takes a moment, so that other threads have their turn in between."""
    start, count = 0, 1
    while start < len(items):
        part = items[start : start + count]
        encoded = encode_many([span_as_json(span) for span in part]) if isinstance(part[0], Span) else to_json(part)
        yield b"%b%b" % (b"," if start else b"[", encoded[1:-1])
        start += count
        count = max(1, min(2 * count, count * PART_BYTES // len(encoded)))  # as many as these, by their size
    yield b"]" if items else b"[]"


def encode_page(page: PaginatedResult[Any]) -> Iterator[bytes]:
    """The parts of the JSON of a page."""
    yield b'{"items":'
    yield from encode_items(page.items)
    yield b',"limit":%d,"offset":%d,"total":%d}' % (page.limit, page.offset, page.total)


def take_frame(unsent: list[bytes]) -> bytes:
    """Take the first messages out of a list, up to the size of a frame, and make one of them."""
    count, size = 0, 0
    while count < len(unsent) and size < MOST_FRAME_BYTES:
        size += len(unsent[count])
        count += 1
    frame = encode_many(unsent[:count])
    del unsent[:count]
    return frame


def notice_fields(notice: Notice) -> dict[str, Any]:
    """A notice as plain values; what does not apply is left out."""
    return {name: value for name, value in notice._asdict().items() if value is not None}


@functools.lru_cache(maxsize=1024)
def encoded_notice(notice: Notice) -> bytes:
    """A notice as JSON, once for all who are told of it."""
    return orjson.dumps(notice_fields(notice))


def as_notice(fields: Mapping[str, Any]) -> Notice:
    """A notice from what `notice_fields` gave; names of a newer release are ignored."""
    return Notice(**{name: fields[name] for name in Notice._fields if name in fields})
