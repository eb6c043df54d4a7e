"""Steps: the spans with which patches record what a library does.

While a step is *entered*, spans that begin in its context are its children. Leaving never touches a context in which
something else is current by now: frameworks close steps in other tasks and threads than they opened them in.

A mistake of ours never reaches the agent: it is logged, and the agent goes on. `record_calls` records the calls of one
function so; patches that hear of a beginning and an end apart make steps themselves, within `guarded`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue
from typing_extensions import Self

from agentlightning.dialects.attributes import as_json
from agentlightning.instrumentation.otel_internals import is_suppressed, set_attributes
from agentlightning.instrumentation.patch import Patch, PatchedCall
from agentlightning.types.agents import agent_name
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.otel import showable, tracer_of

__all__ = [
    "Step",
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

AGENT_NAME: Final = "gen_ai.agent.name"
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
    known: dict[str, AttributeValue] = {"tool.name": tool, "tool.call.type": "function"}
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
