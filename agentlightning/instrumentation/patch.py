"""Patches: changes to third-party code that are made on entry and undone on exit; and the steps that they record.

A patch names the module it changes and waits until that is imported. What it cannot change, because the library is
newer than we know, it leaves as it was, and says so: its model calls are still seen where they reach a model's SDK.

Steps are the spans with which patches record what a library does. While a step is *entered*, spans that begin in its
context are its children. Leaving never touches a context in which something else is current by now: frameworks close
steps in other tasks and threads than they opened them in.

A mistake of ours never reaches the agent: it is logged, and the agent goes on. `record_calls` records the calls of one
function so; patches that hear of a beginning and an end apart make steps themselves, within `guarded`.
"""

import functools
import importlib.metadata
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Final, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue
from typing_extensions import Self

from agentlightning.dialects.attributes import as_json
from agentlightning.instrumentation.imports import ImportWatch, is_installed
from agentlightning.instrumentation.otel_internals import defer_attributes, is_suppressed, set_attributes
from agentlightning.semconv import AGENT_NAME, TOOL_NAME
from agentlightning.types.agents import agent_name
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.otel import showable, tracer_of

__all__ = [
    "Foreign",
    "Original",
    "Patch",
    "PatchedCall",
    "Step",
    "Wrapper",
    "agent_step",
    "as_json",
    "current_agent",
    "guarded",
    "is_suppressed",
    "record_calls",
    "recorded",
    "set_tool_result",
    "tool_step",
    "without_none",
]

logger = logging.getLogger(__name__)


_ABSENT: Final = object()
_WATCH: Final = ImportWatch()  # one for the process, as the import system is
Foreign: TypeAlias = Any
"""Something of a library that is not imported here, so that its type is not known."""
Original = Callable[..., Foreign]
"""A function of the library that is patched."""
Wrapper = Callable[..., Foreign]
"""Called with the original function, then with its arguments."""


@dataclass
class PatchedCall:
    """One call of a function that is patched."""

    args: tuple[object, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Foreign = None
    """What the caller gets; known when the original function has returned."""


class Patch:
    """Changes to one library, undone in reverse order. Used as a context, or with `apply` and `undo`."""

    name: ClassVar[str] = ""
    """What the library is called in messages."""
    module: ClassVar[str] = ""
    """The module whose import is waited for."""
    distribution: ClassVar[str] = ""
    """What the package index calls it, for the version in messages; the module's first part, if empty."""

    def __init__(self) -> None:
        self.is_applied = False
        """Whether the library was found and changed."""
        self.parts: tuple[Patch, ...] = ()
        """Patches of other modules of the library, applied before this one and undone after it."""
        self._changing = threading.RLock()  # protects the steps between applied and undone
        self._undoings: list[Callable[[], object]] = []

    # ------------------------------------------------------------------ for the kinds of patches

    def change(self, module: ModuleType) -> None:
        """Make the changes; called once, with the imported module."""
        raise NotImplementedError

    def replace(self, owner: Any, attribute: str, wrapper: Wrapper) -> None:
        """Have calls of a function, or of a method of a class, made by `wrapper(original, *args, **kwargs)`.

        A coroutine function stays one; its wrapper must be one too.
        """
        self.when_undone(_replaced(owner, attribute, wrapper))

    def surround(
        self, owner: object, attribute: str, context: Callable[..., AbstractContextManager[PatchedCall]]
    ) -> None:
        """Have calls of a function, plain or a coroutine function, made in `context(original, *arguments)`."""

        def call(original: Original, /, *args: object, **kwargs: object) -> Foreign:
            with context(original, *args, **kwargs) as made:
                made.result = original(*made.args, **made.kwargs)
            return made.result

        async def call_async(original: Original, /, *args: object, **kwargs: object) -> Foreign:
            with context(original, *args, **kwargs) as made:
                made.result = await original(*made.args, **made.kwargs)
            return made.result

        is_async = inspect.iscoroutinefunction(getattr(owner, attribute))
        self.replace(owner, attribute, call_async if is_async else call)

    def when_undone(self, undo: Callable[[], object]) -> None:
        """Call this when the patch is undone; the last that was given is called first."""
        self._undoings.append(undo)

    # ------------------------------------------------------------------ for those who apply them

    @property
    def is_installed(self) -> bool:
        """Whether the library could be imported."""
        return is_installed(self.module.partition(".")[0])

    def apply(self) -> None:
        """Change the library now or, if it is not imported yet, when it is; harmless the second time."""
        for part in self.parts:
            part.apply()
        with self._changing:
            if self._undoings:
                return
            self._undoings.append(lambda: setattr(self, "is_applied", False))
        # This waits for whoever is importing the module, and that one may be waiting to change it.
        cancel = _WATCH.when_imported(self.module, self._change_or_degrade)
        with self._changing:
            if self._undoings:
                self._undoings.insert(0, cancel)
                return
        cancel()

    def undo(self) -> None:
        """Leave the library as it was found; harmless if it was not changed."""
        with self._changing:
            while self._undoings:
                self._undo_one()
        for part in reversed(self.parts):
            part.undo()

    def turn_on(self) -> bool:
        """As `apply`, for scripts without a tracer: warns if it is on already, or there is nothing to change.

        True if the library is installed.
        """
        if self._undoings:
            warnings.warn(f"{self.name} is instrumented already; nothing was changed.", stacklevel=3)
        elif not self.is_installed:
            warnings.warn(f"{self.name} is not installed, so it is not instrumented.", stacklevel=3)
            return False
        self.apply()
        return True

    def __enter__(self) -> Self:
        self.apply()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def _change_or_degrade(self, module: ModuleType) -> None:
        with self._changing:
            if self.is_applied or not self._undoings:  # undone while the module was being imported
                return
            done_before = len(self._undoings)
            try:
                self.change(module)
                self.is_applied = True
            except Exception as error:  # noqa: BLE001 # an unknown library must work as if we were not there
                while len(self._undoings) > done_before:
                    self._undo_one()
                logger.warning(
                    "%s %s is not as expected (%s: %s), so its own steps are not recorded; "
                    "model calls it makes with a known SDK still are.",
                    self.name,
                    self._version(),
                    type(error).__name__,
                    error,
                )

    def _undo_one(self) -> None:
        undo = self._undoings.pop()
        with log_failures(logger, "A change to %s could not be undone.", self.name):
            undo()

    def _version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution or self.module.partition(".")[0])
        except importlib.metadata.PackageNotFoundError:
            return "(of unknown version)"


def _replaced(owner: object, attribute: str, wrapper: Wrapper) -> Callable[[], None]:
    """Put our function in the place of a plain function; returns what undoes it."""
    found, original = vars(owner).get(attribute, _ABSENT), getattr(owner, attribute)
    if isinstance(found, (staticmethod, classmethod, property)):
        raise TypeError(f"{owner!r}.{attribute} is a {type(found).__name__}, not a plain function")
    is_undone = False

    # Someone may wrap our function in turn: then it stays in place when it is undone, and does nothing.
    @functools.wraps(original)
    def replaced(*args: object, **kwargs: object) -> Any:
        return original(*args, **kwargs) if is_undone else wrapper(original, *args, **kwargs)

    @functools.wraps(original)
    async def replaced_async(*args: object, **kwargs: object) -> Any:
        return await (original(*args, **kwargs) if is_undone else wrapper(original, *args, **kwargs))

    ours = replaced_async if inspect.iscoroutinefunction(original) else replaced
    setattr(owner, attribute, ours)

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        if vars(owner).get(attribute) is not ours:
            return
        if found is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, found)

    return undo


# ---------------------------------------------------------------------- steps


_AGENT_KEY: Final = otel_context.create_key("agentlightning-agent")


def current_agent() -> str | None:
    """The agent at work here, by the span that is current or, of our own spans, by one around it; None if unknown."""
    span = trace.get_current_span()
    named = agent_name(getattr(span, "attributes", None), getattr(span, "name", ""))
    around = otel_context.get_value(_AGENT_KEY)
    return named or (str(around) if around is not None else None)


def without_none(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """The attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}


class Step:
    """A span that is open."""

    def __init__(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        parent: "Step | None" = None,
        kind: SpanKind = SpanKind.INTERNAL,
        start_time: int | None = None,
        agent: str | None = None,
    ) -> None:
        """Begin now, or at `start_time` in nanoseconds; beneath what is current, unless a parent is given.

        Args:
            agent: Whose work it is, also in the steps beneath.
        """
        self._agent = agent
        self.span: Span = tracer_of(trace.get_tracer_provider()).start_span(
            name,
            None if parent is None else trace.set_span_in_context(parent.span),
            kind=kind,
            attributes=attributes,
            start_time=start_time,
        )
        self._context_before: otel_context.Context | None = None

    def enter(self) -> Self:
        """Spans that begin in this context from now on are children of this one."""
        self._context_before = otel_context.get_current()
        context = trace.set_span_in_context(self.span)
        otel_context.attach(
            context if self._agent is None else otel_context.set_value(_AGENT_KEY, self._agent, context)
        )
        return self

    def leave(self) -> None:
        """Make current what was current before, where this step still is."""
        if self._context_before is not None and trace.get_current_span() is self.span:
            otel_context.attach(self._context_before)
        self._context_before = None

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        set_attributes(self.span, attributes)

    def defer(self, compute: Callable[[], Mapping[str, AttributeValue]]) -> None:
        """Compute attributes only if somebody reads those of the span after its end, which follows."""
        defer_attributes(self.span, compute)

    def end(self, *, error: BaseException | str | None = None, end_time: int | None = None) -> None:
        """Leave, note the error if there was one, and end; harmless the second time."""
        self.leave()
        if isinstance(error, BaseException):
            error = showable(error)
            self.span.record_exception(error)
            error = f"{type(error).__name__}: {error}"
        if error is not None:
            self.span.set_status(StatusCode.ERROR, error)
        self.span.end(end_time)

    __enter__ = enter

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.end(error=error)


def agent_step(agent: str, *, key: str = AGENT_NAME, attributes: Mapping[str, AttributeValue] | None = None) -> Step:
    """The work of an agent, which gives its name to all that is beneath.

    Args:
        key: The attribute that holds the agent's name; `types.agents` must know it.
    """
    return Step(f"{agent}.agent", {key: agent, **(attributes or {})}, agent=agent)


def tool_step(
    tool: str,
    arguments: Any = None,
    *,
    call_id: str | None = None,
    name: str | None = None,
    parent: Step | None = None,
) -> Step:
    """The work of a tool.

    Args:
        call_id: The id that the model gave to the call.
        name: Of the span; after the tool, if left out.
    """
    known: dict[str, AttributeValue] = {TOOL_NAME: tool, "tool.call.type": "function"}
    if arguments is not None:
        known["tool.parameters"] = as_json(arguments)
    if call_id is not None:
        known["tool.call.id"] = call_id
    return Step(name or f"{tool}.tool", known, parent=parent)


def set_tool_result(step: Step, result: object) -> None:
    """Record what the tool returned."""
    step.set({"tool.result": as_json(result)})


# ---------------------------------------------------------------------- the border between our code and the agent's


def guarded(library: str) -> log_failures:
    """Around code of ours that runs inside a library; never around the library's own, whose errors are its own."""
    return log_failures(logger, "A step of %s could not be recorded.", library)


@contextmanager
def recorded(
    library: str, open_step: Callable[[], Step | None], *, harmless: tuple[type[BaseException], ...] = ()
) -> Iterator[Step | None]:
    """Do a library's work as a step, which fails if the work does; without one where it cannot or must not be.

    Args:
        harmless: Exceptions by which the library says something else than that the work failed.
    """
    step: Step | None = None
    with guarded(library):
        opened = None if is_suppressed() else open_step()
        step = None if opened is None else opened.enter()
    failure: BaseException | None = None
    try:
        yield step
    except BaseException as error:
        failure = None if isinstance(error, harmless) else error
        raise
    finally:
        if step is not None:
            with guarded(library):
                step.end(error=failure)


def record_calls(
    patch: Patch,
    owner: object,
    attribute: str,
    open_step: Callable[..., Step | None],
    *,
    on_result: Callable[[Step, object], None] | None = None,
    harmless: tuple[type[BaseException], ...] = (),
) -> None:
    """Have each call of a function or method, plain or a coroutine function, recorded as a step.

    Args:
        open_step: Gets the arguments of the call; None if it is not to be recorded.
        on_result: Gets the step and what the call returned.
    """

    @contextmanager
    def record(_original: object, /, *args: object, **kwargs: object) -> Iterator[PatchedCall]:
        made = PatchedCall(args, kwargs)
        with recorded(patch.name, lambda: open_step(*args, **kwargs), harmless=harmless) as step:
            yield made
            if step is not None and on_result is not None:
                with guarded(patch.name):
                    on_result(step, made.result)

    patch.surround(owner, attribute, record)
