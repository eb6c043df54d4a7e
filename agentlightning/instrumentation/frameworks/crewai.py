"""CrewAI: crews, tasks, agents, tools, guardrails and flows, as its event bus tells of them.

The bus calls its handlers on other threads, where a span could not become the parent of what the agent does next. So
`emit` itself is replaced, which is called in the context of the work. Steps that are open in a context form a chain,
and an event that ends one also ends what began within it and has not ended.

Tasks carry `crewai.task.*` and crews the number of their tasks, from which progress can be read. The agent to whom work
is delegated stands beneath the tool that delegates.
"""

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from agentlightning.instrumentation.patch import (
    Original,
    Patch,
    Step,
    agent_step,
    as_json,
    guarded,
    is_suppressed,
    set_tool_result,
    tool_step,
    without_none,
)

_AGENT_ROLE: Final = "crewai.agent.role"


@dataclass(frozen=True)
class _Work:
    """A step that is open, and the one around it in the same context."""

    kind: str
    source: Any
    """Who told of it; the end of the same work is told by the same object."""
    step: Step
    around: "_Work | None"


_innermost: ContextVar[_Work | None] = ContextVar("agentlightning_crewai_work", default=None)
_tool_call_id: ContextVar[str | None] = ContextVar("agentlightning_crewai_tool_call_id", default=None)


_TOOL_CALLERS: Final = (
    ("crewai.agents.agent_executor:AgentExecutor", "_execute_single_native_tool_call"),
    ("crewai.experimental.agent_executor:AgentExecutor", "_execute_single_native_tool_call"),
    ("crewai.agents.crew_agent_executor:CrewAgentExecutor", "_execute_single_native_tool_call"),
    ("crewai.agents.step_executor", "execute_single_native_tool_call"),
)
"""Where releases of CrewAI call tools; none has all of them."""


class CrewAIPatch(Patch):
    """Records what CrewAI's agents do."""

    name = "CrewAI"
    module = "crewai"

    def change(self, module: ModuleType) -> None:
        self.replace(importlib.import_module("crewai.events.event_bus").CrewAIEventsBus, "emit", _emit)
        for owner in (module.Crew, module.Flow, module.Agent):
            self.replace(owner, "kickoff_async", _ended_when_cancelled)
        self.replace(module.Crew, "akickoff", _ended_when_cancelled)
        self.replace(module.Task, "aexecute_sync", _ended_when_cancelled)
        # Without these, which are not public, tools are recorded all the same, but not the ids of their calls.
        for owner, function in tool_callers():
            self.replace(owner, function, _called_by_model)


def tool_callers() -> list[tuple[Any, str]]:
    """The classes and modules of this release that call tools for a model, each with its function that does."""
    found: dict[int, tuple[object, str]] = {}
    for address, function in _TOOL_CALLERS:
        with suppress(ImportError, AttributeError):
            owner = pkgutil.resolve_name(address)
            if hasattr(owner, function):
                found[id(owner)] = (owner, function)
    return list(found.values())


def _emit(original: Original, bus: Any, source: Any, event: Any) -> object:
    with guarded(CrewAIPatch.name):
        if event.type in _BEGINNINGS:
            _begin(source, event)
        elif event.type in _ENDINGS:
            _end(source, event)
    return original(bus, source, event)


def _begin(source: Any, event: Any) -> None:
    # CrewAI's own agents and memory are built on flows.
    is_internal = event.type == "flow_started" and type(source).__module__.startswith("crewai.")
    if not (is_suppressed() or is_internal):
        kind, make = _BEGINNINGS[event.type]
        _innermost.set(_Work(kind, source, make(source, event).enter(), _innermost.get()))


def _end(source: object, event: Any) -> None:
    kind, finish = _ENDINGS[event.type]
    work = _innermost.get()
    while work is not None and not (work.kind == kind and work.source is source):
        work = work.around
    if work is None:
        return
    _end_within(work)
    _innermost.set(work.around)
    try:
        finish(work.step, event)
    except Exception:  # an event of a shape we do not know still ends its step
        work.step.end()
        raise


def _end_within(outer: _Work | None, error: BaseException | str = "It was not told how this ended.") -> None:
    """End what began in this context since `outer`, the last first."""
    work = _innermost.get()
    while work is not None and work is not outer:
        work.step.end(error=error)
        work = work.around
    _innermost.set(outer)


async def _ended_when_cancelled(original: Original, *args: object, **kwargs: object) -> object:
    """CrewAI tells of errors, but not of being cancelled."""
    around = _innermost.get()
    try:
        return await original(*args, **kwargs)
    except BaseException as error:
        with guarded(CrewAIPatch.name):
            _end_within(around, error)
        raise


def _called_by_model(original: Original, *args: object, **kwargs: object) -> object:
    """A call of a tool that the model asked for: an argument is its id or, by name or at the end, the call itself."""
    around = _innermost.get()
    called = kwargs if "call_id" in kwargs else kwargs.get("tool_call") or args[-1]
    _tool_call_id.set(_id_of(called))
    try:
        return original(*args, **kwargs)
    except BaseException as error:
        with guarded(CrewAIPatch.name):
            _end_within(around, error)
        raise
    finally:
        _tool_call_id.set(None)


def _id_of(tool_call: object) -> str | None:
    """The id in any of the shapes in which models' clients give tool calls; some models give none."""
    if isinstance(tool_call, dict):
        found = tool_call.get("call_id") or tool_call.get("id") or tool_call.get("toolUseId")
    else:
        found = getattr(tool_call, "id", None)
    return found if isinstance(found, str) else None


# ---------------------------------------------------------------------- how each kind of work begins


def _crew_begins(crew: Any, event: Any) -> Step:
    attributes = {
        "crewai.crew.tasks": len(crew.tasks),
        "crewai.crew.agents": len(crew.agents),
        "crewai.crew.process": getattr(crew.process, "value", str(crew.process)),
        "crewai.crew.name": event.crew_name,
        "crewai.crew.id": str(crew.id),
        "crewai.crew.inputs": as_json(event.inputs) if event.inputs else None,
    }
    return Step(f"{event.crew_name or 'crew'}.crew", without_none(attributes))


def _task_begins(task: Any, event: Any) -> Step:
    attributes = {
        "crewai.task.id": str(task.id),
        "crewai.task.description": task.description,
        "crewai.task.expected_output": task.expected_output,
        "crewai.task.async_execution": bool(task.async_execution),
        "crewai.task.name": task.name,
        "crewai.task.agent_role": _role_of(task.agent),
        "crewai.task.context": event.context or None,
    }
    return Step(f"{task.name or 'task'}.task", without_none(attributes))


def _agent_begins(agent: Any, event: Any) -> Step:
    task_id = None if event.task is None else str(event.task.id)
    attributes = without_none({"crewai.agent.id": str(agent.id), "crewai.task.id": task_id})
    return agent_step(_role_of(agent) or "agent", key=_AGENT_ROLE, attributes=attributes)


def _lone_agent_begins(_agent: object, event: Any) -> Step:
    return agent_step(str(event.agent_info.get("role") or "agent").strip(), key=_AGENT_ROLE)


def _role_of(agent: object) -> str | None:
    """Roles written in YAML end with a line break."""
    role = getattr(agent, "role", None)
    return role.strip() if isinstance(role, str) else None


def _tool_begins(_source: object, event: Any) -> Step:
    call_id = _tool_call_id.get()
    _tool_call_id.set(None)  # tools that are used within this one were not called by this call
    return tool_step(event.tool_name, event.tool_args, call_id=call_id)


def _guardrail_begins(_source: object, event: Any) -> Step:
    attributes = {
        "crewai.guardrail.retry_count": event.retry_count,
        "crewai.guardrail.type": event.guardrail_type,
        "crewai.guardrail.name": event.guardrail_name,
    }
    return Step("guardrail", without_none(attributes))


def _flow_begins(_flow: object, event: Any) -> Step:
    inputs = as_json(event.inputs) if event.inputs else None
    attributes = without_none({"crewai.flow.name": event.flow_name, "crewai.flow.inputs": inputs})
    return Step(f"{event.flow_name}.flow", attributes)


def _method_begins(_flow: object, event: Any) -> Step:
    return Step(f"{event.method_name}.method", {"crewai.flow.method": event.method_name})


# ---------------------------------------------------------------------- how each kind of work ends


def _ends(step: Step, _event: object) -> None:
    step.end()


def _ends_with(attribute: str, field: str = "output") -> Callable[[Step, object], None]:
    """What came out is kept as an attribute."""

    def tell(step: Step, event: object) -> None:
        output = getattr(event, field)
        if output is not None:
            step.set({attribute: as_json(getattr(output, "raw", output))})
        step.end()

    return tell


def _fails(step: Step, event: Any) -> None:
    kind = getattr(event, "error_type", None)
    is_raised = isinstance(event.error, BaseException)
    described = f"{kind.__name__}: {event.error}" if isinstance(kind, type) else str(event.error)
    step.end(error=event.error if is_raised else described)


def _tool_ends(step: Step, event: Any) -> None:
    set_tool_result(step, event.output)
    if event.from_cache:
        step.set({"crewai.tool.from_cache": True})
    failure = getattr(event, "failure", None)
    step.end(error=None if failure is None else str(failure.message))


def _guardrail_ends(step: Step, event: Any) -> None:
    step.set({"crewai.guardrail.success": event.success})
    if event.error:
        step.set({"crewai.guardrail.error": event.error})
    step.end()


_BEGINNINGS: Final[dict[str, tuple[str, Callable[[Any, Any], Step]]]] = {
    "crew_kickoff_started": ("crew", _crew_begins),
    "task_started": ("task", _task_begins),
    "agent_execution_started": ("agent", _agent_begins),
    "lite_agent_execution_started": ("lone agent", _lone_agent_begins),
    "tool_usage_started": ("tool", _tool_begins),
    "llm_guardrail_started": ("guardrail", _guardrail_begins),
    "flow_started": ("flow", _flow_begins),
    "method_execution_started": ("method", _method_begins),
}
"""Kind of work and who makes its step, by the type of the event."""

_ENDINGS: Final[dict[str, tuple[str, Callable[[Step, Any], None]]]] = {
    "crew_kickoff_completed": ("crew", _ends_with("crewai.crew.output")),
    "crew_kickoff_failed": ("crew", _fails),
    "task_completed": ("task", _ends_with("crewai.task.output")),
    "task_failed": ("task", _fails),
    "agent_execution_completed": ("agent", _ends_with("crewai.agent.output")),
    "agent_execution_error": ("agent", _fails),
    "lite_agent_execution_completed": ("lone agent", _ends_with("crewai.agent.output")),
    "lite_agent_execution_error": ("lone agent", _fails),
    "tool_usage_finished": ("tool", _tool_ends),
    "tool_usage_error": ("tool", _fails),
    "llm_guardrail_completed": ("guardrail", _guardrail_ends),
    "flow_finished": ("flow", _ends_with("crewai.flow.output", "result")),
    "flow_failed": ("flow", _fails),
    "flow_paused": ("flow", _ends),
    "method_execution_finished": ("method", _ends_with("crewai.method.output", "result")),
    "method_execution_failed": ("method", _fails),
    "method_execution_paused": ("method", _ends),
}
"""Kind of work and who ends its step, by the type of the event."""
