"""Annotations and operations: attributes of your own, and spans around a piece of work."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, TypeVar, overload

from typing_extensions import Self

from agentlightning.emitter.emission import EmittedSpan, emit, user_attributes
from agentlightning.emitter.utils import get_tracer
from agentlightning.errors import ConfigurationError, TracingError
from agentlightning.semconv import AGL_ANNOTATION, AGL_OPERATION, LightningSpanAttributes
from agentlightning.tracer.base import get_active_tracer
from agentlightning.tracer.spans import operation as otel_operation
from agentlightning.types import SpanCoreFields, SpanRecordingContext
from agentlightning.utils.otel import flatten_attributes, sanitize_attributes

__all__ = ["OperationContext", "emit_annotation", "operation"]


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

_NAME = LightningSpanAttributes.OPERATION_NAME.value
_INPUT = LightningSpanAttributes.OPERATION_INPUT.value
_OUTPUT = LightningSpanAttributes.OPERATION_OUTPUT.value


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> EmittedSpan | None:
    """Record attributes; nested ones get dotted names. ValueError for values a span cannot hold.

    Args:
        propagate: False makes the span without sending it anywhere.
    """
    if not isinstance(annotation, Mapping):
        raise ValueError(f"An annotation must be a mapping; this one is of type {type(annotation).__name__}.")
    return emit(AGL_ANNOTATION, user_attributes(annotation), get_tracer, propagate=propagate)


class OperationContext:
    """A span around a piece of work: a block to enter (`with operation(name="search") as op: op.set_output(...)`), or
    a decorator to apply to a function."""

    def __init__(self, name: str | None, attributes: Mapping[str, Any], *, propagate: bool = True) -> None:
        self.name = name or AGL_OPERATION
        self._given_name, self._given_attributes = name, attributes
        self._attributes = {**user_attributes(attributes), _NAME: self.name}
        self._propagate = propagate
        self._context: AbstractContextManager[SpanRecordingContext] | None = None
        self._recording: SpanRecordingContext | None = None

    def __enter__(self) -> Self:
        active = get_active_tracer()
        if self._propagate and active is not None and not active.uses_opentelemetry:
            self._context = active.operation_context(AGL_OPERATION, self._attributes)
        else:
            tracer = get_tracer() if self._propagate else get_tracer(use_active_span_processor=False)
            self._context = otel_operation(tracer, AGL_OPERATION, self._attributes)
        self._recording = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._context is not None
        self._context.__exit__(kind, error, traceback)

    def __call__(self, function: _FunctionT) -> _FunctionT:
        """The function, each call of which is recorded with its arguments and its result."""
        signature = inspect.signature(function)
        name = self._given_name or str(getattr(function, "__name__", type(function).__name__))

        def begin(args: Any, kwargs: Any) -> OperationContext:
            context = OperationContext(name, self._given_attributes, propagate=self._propagate)
            with suppress(TypeError):  # a call that does not fit is left to fail by itself
                call = signature.bind(*args, **kwargs)
                call.apply_defaults()
                inputs = {f"{_INPUT}.{name}": value for name, value in call.arguments.items() if name != "self"}
                context._attributes |= sanitize_attributes(flatten_attributes(inputs))
            return context

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
                with begin(args, kwargs) as context:
                    result = await function(*args, **kwargs)
                    context.set_output(result)
                    return result

            return async_wrapper  # type: ignore[return-value] # it has the signature of what it wraps

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with begin(args, kwargs) as context:
                result = function(*args, **kwargs)
                context.set_output(result)
                return result

        return wrapper  # type: ignore[return-value] # as above

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Note what goes in: positional arguments as the list `args`, others by name."""
        positional = {str(position): value for position, value in enumerate(args)}
        self._note({_INPUT: {"args": positional, **kwargs}})

    def set_output(self, output: Any) -> None:
        """Note what comes out: a mapping by its keys, anything else as one value."""
        self._note({_OUTPUT: output})

    def span(self) -> SpanCoreFields:
        """The span as it stands."""
        return self._entered().get_recorded_span()

    def _note(self, values: Mapping[str, object]) -> None:
        self._entered().record_attributes(sanitize_attributes(flatten_attributes(values)))

    def _entered(self) -> SpanRecordingContext:
        if self._recording is None:
            raise TracingError(f"Operation '{self.name}' has not begun; use it in a `with` statement.")
        return self._recording


@overload
def operation(fn: _FunctionT, *, propagate: bool = ..., name: str | None = ..., **attributes: Any) -> _FunctionT: ...
@overload
def operation(
    fn: None = None, *, propagate: bool = ..., name: str | None = ..., **attributes: Any
) -> OperationContext: ...
def operation(fn: Any = None, *, propagate: bool = True, name: str | None = None, **attributes: Any) -> Any:
    """Record a function (`@operation`, `@operation(name="search")`) or a block (`with operation(name="search")`).

    The span is called `agentlightning.operation`; the arguments and the result of a function are noted on it.

    Args:
        propagate: False makes the span without sending it anywhere.
        name: What is done; by default the name of the function.
        attributes: More to note on the span.
    """
    if name is not None and _NAME in attributes:
        raise ConfigurationError(f"name is {name!r} and the attribute {_NAME} is given too; use one of them.")
    made = OperationContext(attributes.pop(_NAME, name), attributes, propagate=propagate)
    if fn is None:
        return made
    if not callable(fn):
        raise ConfigurationError(
            f"operation takes a function; {fn!r} is of type {type(fn).__name__}. Use operation(name=...)."
        )
    return made(fn)
