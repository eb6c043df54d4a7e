"""smolagents: the runs of its agents, the tools they call and the code they write become steps.

Agents that call tools and agents that write code share their runs and their tools. The code of an agent is executed on
a thread of its own; `instrumentation.threads` carries the context there, so that the tools it calls are beneath it.
"""

import importlib
import weakref
from collections.abc import Callable, Generator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from agentlightning.instrumentation.patch import (
    Original,
    Patch,
    Step,
    agent_step,
    guarded,
    record_calls,
    recorded,
    set_tool_result,
    tool_step,
)

_HAS_STEP: ContextVar[Any] = ContextVar("agentlightning_smolagents_tool", default=None)
"""The tool an agent is about to call, whose step is open already."""


class SmolagentsPatch(Patch):
    name = "smolagents"
    module = "smolagents"

    def change(self, module: ModuleType) -> None:
        calls = _ToolCalls()
        self.replace(module.MultiStepAgent, "run", _run)
        self.replace(module.ToolCallingAgent, "process_tool_calls", calls.announce)
        self.replace(module.ToolCallingAgent, "execute_tool_call", calls.execute)
        record_calls(self, module.Tool, "__call__", _tool, on_result=set_tool_result)
        local = importlib.import_module("smolagents.local_python_executor").LocalPythonExecutor
        remote = importlib.import_module("smolagents.remote_executors").RemotePythonExecutor
        for executor in (local, remote):
            record_calls(self, executor, "__call__", _code, on_result=_record_output)


# ---------------------------------------------------------------------- agents


def _run(original: Original, agent: Any, /, *args: object, **kwargs: object) -> Any:
    def open_step() -> Step:
        name = agent.name or type(agent).__name__
        return agent_step(name, attributes={"smolagents.agent.name": name})

    if kwargs.get("stream", args[1] if len(args) > 1 else False):
        return _stream(original(agent, *args, **kwargs), open_step)
    with recorded(SmolagentsPatch.name, open_step):
        return original(agent, *args, **kwargs)


def _stream(run: Any, open_step: Callable[[], Step]) -> Generator[Any, None, Any]:
    """A run that is told bit by bit; the step is current while the agent works, not while the program does."""
    with recorded(SmolagentsPatch.name, open_step, harmless=(GeneratorExit,)) as step:
        while True:
            try:
                told = next(run)
            except StopIteration as end:
                return end.value
            if step is not None:
                step.leave()
            try:
                yield told
            except GeneratorExit:
                run.close()
                raise
            finally:
                if step is not None:
                    step.enter()


# ---------------------------------------------------------------------- tools


class _ToolCalls:
    """The tool calls that agents are about to make; smolagents does not hand their ids to what makes them."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

    def announce(self, original: Original, agent: Any, /, *args: Any, **kwargs: Any) -> Any:
        with guarded(SmolagentsPatch.name):
            message = args[0] if args else kwargs["chat_message"]
            self._waiting[agent] = dict(enumerate(message.tool_calls or ()))
        return original(agent, *args, **kwargs)

    def execute(
        self,
        original: Original,
        agent: Any,
        /,
        tool_name: str,
        arguments: object,
        *args: object,
        **kwargs: object,
    ) -> Any:
        def open_step() -> Step:
            _HAS_STEP.set(agent.tools.get(tool_name))
            return tool_step(tool_name, arguments, call_id=self._claimed_id(agent, tool_name, arguments))

        with recorded(SmolagentsPatch.name, open_step) as step:
            try:
                result = original(agent, tool_name, arguments, *args, **kwargs)
            finally:
                _HAS_STEP.set(None)
            if step is not None:
                with guarded(SmolagentsPatch.name):
                    set_tool_result(step, result)
            return result

    def _claimed_id(self, agent: object, tool_name: str, arguments: object) -> str | None:
        """Of the first call with this name and these arguments; calls that are alike are made at the same time."""
        waiting = self._waiting.get(agent, {})
        for number, call in tuple(waiting.items()):
            wanted = call.function
            is_same = wanted.name == tool_name and (wanted.arguments or {}) == arguments
            if is_same and waiting.pop(number, None) is not None:  # no other thread took it
                return str(call.id)
        return None


def _tool(tool: Any, /, *args: object, sanitize_inputs_outputs: Any = None, **kwargs: object) -> Step | None:
    """A tool that is called by an agent's code, or by another tool; None if the agent's call has a step already."""
    if _HAS_STEP.get() is tool:
        _HAS_STEP.set(None)
        return None
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        return tool_step(tool.name, args[0])
    return tool_step(tool.name, {**dict(zip(tool.inputs, args, strict=False)), **kwargs})


def _code(_executor: object, code_action: str, *_args: object, **_kwargs: object) -> Step:
    # What smolagents calls the tool that executes an agent's code.
    return tool_step("python_interpreter", {"code": code_action})


def _record_output(step: Step, output: Any) -> None:
    set_tool_result(step, {"logs": output.logs, "output": output.output})
