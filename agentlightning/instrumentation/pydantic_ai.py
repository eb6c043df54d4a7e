"""PydanticAI: the runs of its agents and the calls of their tools become steps.

Every way to run an agent goes through `Agent.iter`, and every tool a model calls through the tool manager. Where the
program switched on PydanticAI's own instrumentation, its spans stand between our steps and the model calls.
"""

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any, Final

from agentlightning.instrumentation.guard import record_result, recorded
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.spans import Step, agent_step, tool_step

__all__ = ["PydanticAIPatch"]

_UNNAMED: Final = "agent"
"""What PydanticAI itself calls an agent without a name in a trace."""


class PydanticAIPatch(Patch):
    name = "PydanticAI"
    module = "pydantic_ai"
    distribution = "pydantic-ai-slim"

    def change(self, module: ModuleType) -> None:
        tool_manager = importlib.import_module("pydantic_ai.tool_manager")
        self.replace(module.Agent, "iter", _iterate)
        self.replace(
            tool_manager.ToolManager, "execute_tool_call", _execute_tool((module.CallDeferred, module.ApprovalRequired))
        )


def _iterate(
    original: Callable[..., AbstractAsyncContextManager[Any]], agent: Any, /, *args: Any, **kwargs: Any
) -> AbstractAsyncContextManager[Any]:
    return _running(agent, original(agent, *args, **kwargs))


@asynccontextmanager
async def _running(agent: Any, run: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """A run of the agent, in whose context its model requests and tools work."""
    with recorded(PydanticAIPatch.name, lambda: agent_step(agent.name or _UNNAMED)):
        async with run as agent_run:
            yield agent_run


def _execute_tool(postponing: tuple[type[Exception], ...]) -> Callable[..., Awaitable[Any]]:
    """A call of a tool; one that is postponed, to be approved or done elsewhere, has not failed."""

    async def execute(
        original: Callable[..., Awaitable[Any]], manager: Any, /, validated: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def open_step() -> Step:
            call = validated.call
            return tool_step(call.tool_name, call.args, call_id=call.tool_call_id)

        with recorded(PydanticAIPatch.name, open_step, harmless=postponing) as step:
            result = await original(manager, validated, *args, **kwargs)
            record_result(PydanticAIPatch.name, step, result)
            return result

    return execute
