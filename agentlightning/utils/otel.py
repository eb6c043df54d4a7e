"""Helpers around OpenTelemetry: nested values as flat attributes, exceptions, and the provider.

OpenTelemetry's attributes are flat. We write nested values with dots (`agentlightning.reward.0.value`). Everything here
is a pure function except `get_tracer` and `get_tracer_provider`, which look up what this process has installed and
never install anything.
"""

import contextlib
import functools
import json
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace

from agentlightning.errors import NoActiveTracer
from agentlightning.utils.deprecation import missing_name

if TYPE_CHECKING:  # the SDK is slow to import
    from opentelemetry.sdk.trace import TracerProvider

__all__ = [
    "flatten_attributes",
    "sanitize_attributes",
    "sanitize_attribute_value",
    "sanitize_list_attribute_sanity",
    "check_attributes_sanity",
    "format_exception_attributes",
    "full_qualified_name",
    "get_tracer",
    "get_tracer_provider",
]

SCOPE_NAME: Final = "agentlightning"
"""Instrumentation scope of the spans we write."""
_SCALARS = (str, bool, int, float)

# ---------------------------------------------------------------------- nested values


def flatten_attributes(
    nested_data: Mapping[str, object] | Sequence[object], *, expand_leaf_lists: bool = False
) -> dict[str, Any]:
    """Nested mappings and lists under dotted keys: `{"a": {"b": [{"c": 1}]}}` is `{"a.b.0.c": 1}`.

    Args:
        expand_leaf_lists: Also give each item of a list of plain values a key of its own; otherwise such a list is a
            value, if its items are of one type. An empty mapping leaves nothing behind, and neither does an empty list
            that is expanded.
    """
    return dict(_leaves(nested_data, "", expand_leaf_lists))


def _leaves(value: Any, path: str, expand: bool) -> Iterator[tuple[str, Any]]:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    if is_list and path and not expand and len(kinds := _kinds(value)) <= 1 and None not in kinds:
        yield path, value
    elif is_list or isinstance(value, Mapping):
        for key, item in enumerate(value) if is_list else value.items():
            if not isinstance(key, (str, int)):
                raise ValueError(
                    f"Key {key!r} below '{path}' is of type {type(key).__name__}; attribute keys are strings."
                )
            yield from _leaves(item, f"{path}.{key}" if path else str(key), expand)
    else:
        yield path, value


# ---------------------------------------------------------------------- values OpenTelemetry takes


def sanitize_attribute_value(object: Any) -> Any:
    """A value an attribute can hold: plain values and flat lists of them as they are, others as JSON or plain text."""
    if isinstance(object, _SCALARS):
        return object
    if isinstance(object, (list, tuple)):
        with contextlib.suppress(ValueError, OverflowError):
            return sanitize_list_attribute_sanity(object)
    try:
        return json.dumps(object, default=str, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(object)


def sanitize_list_attribute_sanity(maybe_list: Sequence[Any]) -> list[Any]:
    """A list an attribute can hold: its items are of one type, numbers of several types are made of one.

    Raises:
        ValueError: some items are neither text, booleans nor numbers, or only some of them are text.
    """
    kinds = _kinds(maybe_list)
    if len(kinds) > 1 and not kinds & {str, None}:
        number = float if float in kinds else int
        return [number(item) for item in maybe_list]
    if len(kinds) > 1 or None in kinds:
        names = sorted({type(item).__name__ for item in maybe_list})
        raise ValueError(f"The list has items of the types {', '.join(names)}; give text only, or numbers only.")
    return list(maybe_list)


def _kinds(values: Iterable[object]) -> set[type | None]:
    """The plain types of the items; None stands for every other type."""
    return {next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None) for value in values}


def sanitize_attributes(attributes: Mapping[str, object]) -> dict[str, Any]:
    """Attributes of which every value can be held; see `sanitize_attribute_value`."""
    return {str(key): sanitize_attribute_value(value) for key, value in attributes.items()}


def check_attributes_sanity(attributes: Mapping[Any, Any]) -> None:
    """Raise ValueError for the first key or value that OpenTelemetry, or JSON, could not hold."""
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"Attribute key {key!r} is of type {type(key).__name__}; attribute keys are strings.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"Attribute '{key}' is {value}; attributes hold finite numbers only.")
        if isinstance(value, (list, tuple)):
            try:
                sanitize_list_attribute_sanity(value)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"Attribute '{key}': {error}") from error
        elif not isinstance(value, _SCALARS):
            kind = type(value).__name__
            raise ValueError(f"Attribute '{key}' is of type {kind}; use a string, bool, number, or a list of one.")


# ---------------------------------------------------------------------- exceptions and names


def showable(exception: BaseException) -> BaseException:
    """The exception; for one whose own text cannot be made, another of its name and place that says so."""
    try:
        str(exception)
    except Exception as error:  # noqa: BLE001 # code of the exception's class, which may do anything
        kind = type(type(exception).__name__, (Exception,), {"__module__": type(exception).__module__})
        shown: Exception = kind(f"<its text cannot be shown: {type(error).__name__}>")
        return shown.with_traceback(exception.__traceback__)
    return exception


def format_exception_attributes(exception: BaseException) -> dict[str, Any]:
    """An exception under the keys of OpenTelemetry's conventions; the stack trace only if there is one."""
    shown = showable(exception)
    stacktrace = "".join(traceback.format_exception(type(shown), shown, shown.__traceback__))
    named = {"exception.type": type(shown).__name__, "exception.message": str(shown), "exception.escaped": True}
    return {**named, "exception.stacktrace": stacktrace} if stacktrace.strip() else named


def full_qualified_name(obj: object) -> str:
    """Module and name of a class or function; built-ins go without their module."""
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__
    module = getattr(obj, "__module__", None)
    return str(name) if module in (None, "builtins") else f"{module}.{name}"


# ---------------------------------------------------------------------- the provider


def get_tracer_provider(inspect: bool = True) -> "TracerProvider":
    """The tracer provider of this process.

    Args:
        inspect: Accepted and ignored.
    """
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        raise NoActiveTracer(
            "No tracer is listening: run this inside a rollout, or inside `with OtelTracer().lifespan():`, "
            "or install an OpenTelemetry tracer provider first."
        )
    return provider  # type: ignore[return-value] # the API's type, which a provider other than the SDK's may be


def get_tracer(use_active_span_processor: bool = True) -> trace.Tracer:
    """The OpenTelemetry tracer our spans are written with.

    Args:
        use_active_span_processor: False gives a tracer whose spans can be read but are sent nowhere.
    """
    return tracer_of(get_tracer_provider()) if use_active_span_processor else _silent_tracer()


@functools.lru_cache(maxsize=1)
def tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    """Kept because asking a provider costs half of what a span does."""
    return provider.get_tracer(SCOPE_NAME)


@functools.cache
def _silent_tracer() -> trace.Tracer:
    # Here, because everything else in this module does without the SDK, which is slow to import.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    return TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False).get_tracer(SCOPE_NAME)


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name)
