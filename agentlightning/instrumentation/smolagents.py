"""smolagents: the runs of its agents, the tools they call and the code they write become steps.

Agents that call tools and agents that write code share their runs and their tools. The code of an agent is executed on
a thread of its own; `instrumentation.threads` carries the context there, so that the tools it calls are beneath it.
"""

import importlib
import weakref
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final

from agentlightning.instrumentation.guard import guarded, record_result, recorded
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.spans import Step, agent_step, tool_step

__all__ = ["SmolagentsPatch"]

_INTERPRETER: Final = "python_interpreter"
"""What smolagents calls the tool that executes an agent's code."""
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
        self.replace(module.Tool, "__call__", _call_tool)
        local = importlib.import_module("smolagents.local_python_executor")
        remote = importlib.import_module("smolagents.remote_executors")
        self.replace(local.LocalPythonExecutor, "__call__", _execute_code)
        self.replace(remote.RemotePythonExecutor, "__call__", _execute_code)


# ---------------------------------------------------------------------- agents


def _run(original: Callable[..., Any], agent: Any, /, *args: Any, **kwargs: Any) -> Any:
    def open_step() -> Step:
        return agent_step(agent.name or type(agent).__name__)

    if _is_streaming(*args, **kwargs):
        return _stream(original(agent, *args, **kwargs), open_step)
    with recorded(SmolagentsPatch.name, open_step):
        return original(agent, *args, **kwargs)


def _is_streaming(_task: Any = None, stream: bool = False, *_args: Any, **_kwargs: Any) -> bool:
    """As the signature of `run` has it."""
    return bool(stream)


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

    def announce(self, original: Callable[..., Any], agent: Any, /, *args: Any, **kwargs: Any) -> Any:
        with guarded(SmolagentsPatch.name):
            message = args[0] if args else kwargs["chat_message"]
            self._waiting[agent] = dict(enumerate(message.tool_calls or ()))
        return original(agent, *args, **kwargs)

    def execute(
        self, original: Callable[..., Any], agent: Any, /, tool_name: str, arguments: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def open_step() -> Step:
            _HAS_STEP.set(agent.tools.get(tool_name))
            return tool_step(tool_name, arguments, call_id=self._claimed_id(agent, tool_name, arguments))

        with recorded(SmolagentsPatch.name, open_step) as step:
            try:
                result = original(agent, tool_name, arguments, *args, **kwargs)
            finally:
                _HAS_STEP.set(None)
            record_result(SmolagentsPatch.name, step, result)
            return result

    def _claimed_id(self, agent: Any, tool_name: str, arguments: Any) -> str | None:
        """Of the first call with this name and these arguments; calls that are alike are made at the same time."""
        waiting = self._waiting.get(agent, {})
        for number, call in tuple(waiting.items()):
            wanted = call.function
            is_same = wanted.name == tool_name and (wanted.arguments or {}) == arguments
            if is_same and waiting.pop(number, None) is not None:  # no other thread took it
                return str(call.id)
        return None


def _call_tool(original: Callable[..., Any], tool: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A tool that is called by an agent's code, or by another tool."""
    if _HAS_STEP.get() is tool:
        _HAS_STEP.set(None)
        return original(tool, *args, **kwargs)
    given = {name: value for name, value in kwargs.items() if name != "sanitize_inputs_outputs"}
    with recorded(SmolagentsPatch.name, lambda: tool_step(tool.name, _by_name(tool, args, given))) as step:
        result = original(tool, *args, **kwargs)
        record_result(SmolagentsPatch.name, step, result)
        return result


def _by_name(tool: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """The arguments of a call; those without a name get the tool's names for them."""
    if len(positional) == 1 and not named and isinstance(positional[0], dict):
        return positional[0]
    return {**dict(zip(tool.inputs, positional, strict=False)), **named}


# ---------------------------------------------------------------------- code


def _execute_code(original: Callable[..., Any], executor: Any, /, code_action: str, *args: Any, **kwargs: Any) -> Any:
    with recorded(SmolagentsPatch.name, lambda: tool_step(_INTERPRETER, {"code": code_action})) as step:
        done = original(executor, code_action, *args, **kwargs)
        with guarded(SmolagentsPatch.name):
            record_result(SmolagentsPatch.name, step, {"logs": done.logs, "output": done.output})
        return done
