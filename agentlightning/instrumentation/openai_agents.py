"""The OpenAI Agents SDK: its agents, tools, hand-offs, guardrails and tool listings become steps.

The SDK tells everything it does to spans of its own. We watch these spans begin and end rather than add a trace
processor: a processor is lost when the program sets its own, hears nothing where tracing is switched off, and is not
told whether a span becomes the current one. What the program set up to trace and export stays as it is.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from opentelemetry.trace import StatusCode

from agentlightning.instrumentation.guard import guarded
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.spans import (
    Step,
    agent_step,
    as_json,
    is_suppressed,
    set_tool_result,
    tool_step,
)

__all__ = ["OpenAIAgentsPatch"]

_STEP: Final = "agentlightning_step"
"""Under which name a span of the SDK keeps its step."""


class OpenAIAgentsPatch(Patch):
    name = "OpenAI Agents SDK"
    module = "agents.tool_context"  # `agents` alone may well be a package of the program
    distribution = "openai-agents"

    def change(self, module: ModuleType) -> None:
        spans = importlib.import_module("agents.tracing.spans")
        for kind in (spans.SpanImpl, spans.NoOpSpan):  # the second stands in where tracing is switched off
            self.replace(kind, "start", _start)
            self.replace(kind, "finish", _finish)
            self.replace(kind, "set_error", _set_error)
        self.replace(module.ToolContext, "__init__", _prepare_tool(spans.Scope.get_current_span))


# ---------------------------------------------------------------------- the life of a span


def _start(original: Callable[..., None], span: Any, /, mark_as_current: bool = False) -> None:
    original(span, mark_as_current)
    with guarded(OpenAIAgentsPatch.name):
        open_step = _OPENING.get(span.span_data.type)
        if open_step is None or _STEP in vars(span) or is_suppressed():
            return
        step = open_step(span.span_data)
        vars(span)[_STEP] = step.enter() if mark_as_current else step


def _finish(original: Callable[..., None], span: Any, /, reset_current: bool = False) -> None:
    with guarded(OpenAIAgentsPatch.name):
        step: Step | None = vars(span).pop(_STEP, None)
        if step is not None:
            tell_outcome = _CLOSING.get(span.span_data.type)
            try:
                if tell_outcome is not None:
                    tell_outcome(step, span.span_data)
            finally:
                step.end()
    original(span, reset_current)


def _set_error(original: Callable[..., None], span: Any, /, error: Any) -> None:
    original(span, error)
    with guarded(OpenAIAgentsPatch.name):
        step: Step | None = vars(span).get(_STEP)
        if step is not None:
            step.span.set_status(StatusCode.ERROR, _described(error))


def _described(error: Any) -> str:
    """The SDK's message, and the error itself where its data has it."""
    cause = (error.get("data") or {}).get("error")
    return str(error["message"]) if cause is None else f"{error['message']}: {cause}"


def _prepare_tool(current_span: Callable[[], Any]) -> Callable[..., None]:
    """Note the id of a tool call, which only the tool's context knows: it is made inside the tool's span."""

    def prepare(original: Callable[..., None], context: Any, /, *args: Any, **kwargs: Any) -> None:
        original(context, *args, **kwargs)
        with guarded(OpenAIAgentsPatch.name):
            span = current_span()
            step = None if span is None else vars(span).get(_STEP)
            if step is not None and span.span_data.type == "function":
                step.set({"tool.call.id": context.tool_call_id})

    return prepare


# ---------------------------------------------------------------------- the kinds of spans


def _open_handoff(data: Any) -> Step:
    return Step(f"{data.from_agent}.handoff", {"handoff.from_agent": str(data.from_agent)})


def _close_handoff(step: Step, data: Any) -> None:
    if data.to_agent is not None:
        step.set({"handoff.to_agent": data.to_agent})


def _close_tool(step: Step, data: Any) -> None:
    if data.input is not None:
        step.set({"tool.parameters": as_json(data.input)})
    if data.output is not None:
        set_tool_result(step, data.output)
    if data.mcp_data:
        step.set({"mcp.server": str(data.mcp_data.get("server"))})


def _close_guardrail(step: Step, data: Any) -> None:
    step.set({"guardrail.triggered": bool(data.triggered)})


def _open_tool_listing(data: Any) -> Step:
    return Step(f"{data.server}.mcp_tools", {"mcp.server": str(data.server)})


def _close_tool_listing(step: Step, data: Any) -> None:
    if data.result is not None:
        step.set({"mcp.tools": [str(name) for name in data.result]})


_OPENING: dict[str, Callable[[Any], Step]] = {
    "agent": lambda data: agent_step(data.name, key="agent.name"),
    "function": lambda data: tool_step(data.name),
    "handoff": _open_handoff,
    "guardrail": lambda data: Step(f"{data.name}.guardrail", {"guardrail.name": data.name}),
    "mcp_tools": _open_tool_listing,
}
"""How the step of each kind of span begins; other kinds get none: model calls are seen in the model's SDK."""
_CLOSING: dict[str, Callable[[Step, Any], None]] = {
    "function": _close_tool,
    "handoff": _close_handoff,
    "guardrail": _close_guardrail,
    "mcp_tools": _close_tool_listing,
}
"""What is only known when a span ends."""
