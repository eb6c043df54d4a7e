"""Objects: any value that JSON can hold, and those of common types that have one obvious form in JSON."""

import base64
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from agentlightning.emitter.emission import EmittedSpan, emit, plain_value, user_attributes
from agentlightning.emitter.utils import get_tracer
from agentlightning.errors import TracingError
from agentlightning.semconv import AGL_OBJECT, LightningSpanAttributes
from agentlightning.types import SpanAttributeNames, SpanLike
from agentlightning.utils.json_values import parsed
from agentlightning.utils.otel import full_qualified_name

__all__ = ["emit_object", "encode_object", "get_object_value"]

logger = logging.getLogger(__name__)

_TYPE = LightningSpanAttributes.OBJECT_TYPE.value
_LITERAL = LightningSpanAttributes.OBJECT_LITERAL.value
_JSON = LightningSpanAttributes.OBJECT_JSON.value
_OLD_OBJECT = SpanAttributeNames.OBJECT.value
_READERS: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text.lower() == "true",
    "bytes": lambda text: base64.b64decode(text, validate=True),
}


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> EmittedSpan | None:
    """Record a value; one that JSON cannot hold is logged as an error and not recorded.

    Pydantic models, dataclasses, times, sets, enums, paths and numpy's values are written as JSON has them.

    Args:
        attributes: More to note on the span.
        propagate: False makes the span without sending it anywhere.
    """
    try:
        encoded = encode_object(object)
    except TracingError as error:
        logger.error("Object must be JSON serializable: %s", error)
        return None
    return emit(AGL_OBJECT, {**user_attributes(attributes), **encoded}, get_tracer, propagate=propagate)


def encode_object(object: Any) -> dict[str, Any]:
    """A value as attributes of both releases; RuntimeError if JSON cannot hold it.

    Text, numbers and truth values are kept as their `str`, bytes in base64, everything else as JSON (`plain_value`).
    """
    kind = type(object)
    if kind is bytes:
        return {_TYPE: "bytes", _LITERAL: base64.b64encode(object).decode()}
    try:
        text = json.dumps(object, allow_nan=False, default=plain_value)
    except (TypeError, ValueError) as error:
        raise TracingError(f"A {kind.__name__} cannot be recorded: {error}.") from error
    own = {_LITERAL: str(object)} if kind in (str, int, float, bool) else {_JSON: text}
    return {_OLD_OBJECT: text, _TYPE: full_qualified_name(kind), **own}


def literal_value(literal: object, type_name: object) -> object:
    """The value that a literal stands for; of a type that has none, or if it is broken, the literal itself."""
    read = _READERS.get(str(type_name))
    try:
        return read(literal) if read is not None and isinstance(literal, str) else literal
    except ValueError:
        return literal


def get_object_value(span: SpanLike) -> Any:
    """The value of an object span of either release, or its text if that cannot be decoded; None for other spans."""
    attributes = span.attributes or {}
    if _LITERAL in attributes:
        return literal_value(attributes[_LITERAL], attributes.get(_TYPE))
    if _JSON in attributes:
        return parsed(str(attributes[_JSON]), literals=False)
    old = attributes.get(_OLD_OBJECT) if span.name == AGL_OBJECT else None
    return None if old is None else parsed(str(old), literals=False)
