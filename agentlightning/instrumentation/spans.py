"""Spans of steps that are told in two halves: a callback says that something began, another that it ended.

While a step is *entered*, spans that begin in its context are its children. Leaving never touches a context in which
something else is current by now: frameworks close steps in other tasks and threads than they opened them in.
"""

import functools
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue
from typing_extensions import Self

from agentlightning.dialects.attributes import as_json
from agentlightning.types.agents import agent_name
from agentlightning.utils.otel import SCOPE_NAME

__all__ = [
    "Step",
    "agent_step",
    "as_json",
    "current_agent",
    "is_suppressed",
    "set_if_any",
    "set_tool_result",
    "tool_step",
]

AGENT_NAME: Final = "gen_ai.agent.name"
_TOOL_NAME: Final = "tool.name"
_TOOL_ARGUMENTS: Final = "tool.parameters"
_TOOL_CALL_ID: Final = "tool.call.id"
_TOOL_CALL_TYPE: Final = "tool.call.type"
_TOOL_RESULT: Final = "tool.result"
_AGENT_KEY: Final = otel_context.create_key("agentlightning-agent")
_PLAIN: Final = frozenset({str, bool, int, float})


def is_suppressed() -> bool:
    """Whether the program asked OpenTelemetry not to instrument what it does here."""
    return bool(otel_context.get_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY))


def current_agent() -> str | None:
    """The agent at work here, by the span that is current or, of our own spans, by one around it; None if unknown."""
    span = trace.get_current_span()
    named = agent_name(getattr(span, "attributes", None), getattr(span, "name", ""))
    around = otel_context.get_value(_AGENT_KEY)
    return named or (str(around) if around is not None else None)


def set_if_any(attributes: dict[str, AttributeValue], name: str, value: AttributeValue | None) -> None:
    """Set an attribute that has a value."""
    if value is not None:
        attributes[name] = value


@functools.lru_cache(maxsize=1)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    return provider.get_tracer(SCOPE_NAME)


def _set_plainly(span: Span, attributes: Mapping[str, AttributeValue]) -> bool:
    """Write attributes that OpenTelemetry would take as they are; False, and nothing written, if it might not.

    It looks at every value for what it cannot hold, which takes as long as to read a model's answer. Texts and numbers
    it always can, unless the provider limits their number or length.
    """
    held = getattr(span, "_attributes", None)
    if type(held) is not BoundedAttributes or held.maxlen is not None or held.max_value_len is not None:
        return False
    if not span.is_recording() or not _PLAIN.issuperset(map(type, attributes.values())) or "" in attributes:
        return False
    with held._lock:
        held._dict.update(attributes)
    return True


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
        self.span: Span = _tracer_of(trace.get_tracer_provider()).start_span(
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
        if not _set_plainly(self.span, attributes):
            self.span.set_attributes(attributes)

    def end(self, *, error: BaseException | str | None = None, end_time: int | None = None) -> None:
        """Leave, note the error if there was one, and end; harmless the second time."""
        self.leave()
        if isinstance(error, BaseException):
            self.span.record_exception(error)
            error = f"{type(error).__name__}: {error}"
        if error is not None:
            self.span.set_status(StatusCode.ERROR, error)
        self.span.end(end_time)

    def __enter__(self) -> Self:
        return self.enter()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.end(error=error)


def agent_step(
    agent: str,
    *,
    key: str = AGENT_NAME,
    name: str | None = None,
    parent: Step | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Step:
    """The work of an agent, which gives its name to all that is beneath.

    Args:
        key: The attribute that holds the agent's name; `types.agent_names` must know it.
        name: Of the span; after the agent, if left out.
    """
    return Step(name or f"{agent}.agent", {key: agent, **(attributes or {})}, parent=parent, agent=agent)


def tool_step(
    tool: str,
    arguments: Any = None,
    *,
    call_id: str | None = None,
    name: str | None = None,
    parent: Step | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Step:
    """The work of a tool.

    Args:
        call_id: The id that the model gave to the call.
        name: Of the span; after the tool, if left out.
    """
    known: dict[str, AttributeValue] = {_TOOL_NAME: tool, _TOOL_CALL_TYPE: "function", **(attributes or {})}
    if arguments is not None:
        known[_TOOL_ARGUMENTS] = as_json(arguments)
    set_if_any(known, _TOOL_CALL_ID, call_id)
    return Step(name or f"{tool}.tool", known, parent=parent)


def set_tool_result(step: Step, result: Any) -> None:
    """What the tool gave back."""
    step.set({_TOOL_RESULT: as_json(result)})
