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
from opentelemetry.util.types import AttributeValue

from agentlightning.instrumentation.patch import (
    Patch,
    Step,
    agent_step,
    as_json,
    guarded,
    is_suppressed,
    tool_step,
    without_none,
)
from agentlightning.semconv import SPAN_AGENT

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
        if _STEP in vars(span) or is_suppressed():
            return
        step = _opened(span.span_data.type, span.span_data)
        if step is not None:
            vars(span)[_STEP] = step.enter() if mark_as_current else step


def _finish(original: Callable[..., None], span: Any, /, reset_current: bool = False) -> None:
    with guarded(OpenAIAgentsPatch.name):
        step: Step | None = vars(span).pop(_STEP, None)
        if step is not None:
            try:
                step.set(_outcome(span.span_data.type, span.span_data))
            finally:
                step.end()
    original(span, reset_current)


def _set_error(original: Callable[..., None], span: Any, /, error: Any) -> None:
    original(span, error)
    with guarded(OpenAIAgentsPatch.name):
        step: Step | None = vars(span).get(_STEP)
        if step is not None:
            cause = (error.get("data") or {}).get("error")
            described = str(error["message"]) if cause is None else f"{error['message']}: {cause}"
            step.span.set_status(StatusCode.ERROR, described)


def _prepare_tool(current_span: Callable[[], Any]) -> Callable[..., None]:
    """Note the id of a tool call, which only the tool's context knows: it is made inside the tool's span."""

    def prepare(original: Callable[..., None], context: Any, /, *args: object, **kwargs: object) -> None:
        original(context, *args, **kwargs)
        with guarded(OpenAIAgentsPatch.name):
            span = current_span()
            step = None if span is None else vars(span).get(_STEP)
            if step is not None and span.span_data.type == "function":
                step.set({"tool.call.id": context.tool_call_id})

    return prepare


# ---------------------------------------------------------------------- the kinds of spans


def _opened(kind: str, data: Any) -> Step | None:
    """The step of a kind of span; other kinds get none: model calls are seen in the model's SDK."""
    if kind == "agent":
        return agent_step(data.name, key=SPAN_AGENT)
    if kind == "function":
        return tool_step(data.name)
    if kind == "handoff":
        return Step(f"{data.from_agent}.handoff", {"handoff.from_agent": str(data.from_agent)})
    if kind == "guardrail":
        return Step(f"{data.name}.guardrail", {"guardrail.name": data.name})
    if kind == "mcp_tools":
        return Step(f"{data.server}.mcp_tools", {"mcp.server": str(data.server)})
    return None


def _outcome(kind: str, data: Any) -> dict[str, AttributeValue]:
    """What is only known when a span ends."""
    attributes: dict[str, AttributeValue | None] = {}
    if kind == "function":
        attributes["tool.parameters"] = None if data.input is None else as_json(data.input)
        attributes["tool.result"] = None if data.output is None else as_json(data.output)
        attributes["mcp.server"] = str(data.mcp_data.get("server")) if data.mcp_data else None
    elif kind == "handoff":
        attributes["handoff.to_agent"] = data.to_agent
    elif kind == "guardrail":
        attributes["guardrail.triggered"] = bool(data.triggered)
    elif kind == "mcp_tools" and data.result is not None:
        attributes["mcp.tools"] = [str(name) for name in data.result]
    return without_none(attributes)
