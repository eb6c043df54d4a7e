"""PydanticAI: the runs of its agents and the calls of their tools become steps.

Every way to run an agent goes through `Agent.iter`, and every tool a model calls through the tool manager. Where the
program switched on PydanticAI's own instrumentation, its spans stand between our steps and the model calls.
"""

import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any

from agentlightning.instrumentation.patch import (
    Patch,
    Step,
    agent_step,
    record_calls,
    recorded,
    set_tool_result,
    tool_step,
)


class PydanticAIPatch(Patch):
    name = "PydanticAI"
    module = "pydantic_ai"
    distribution = "pydantic-ai-slim"

    def change(self, module: ModuleType) -> None:
        manager = importlib.import_module("pydantic_ai.tool_manager").ToolManager
        postponing = (module.CallDeferred, module.ApprovalRequired)  # to be approved or done elsewhere is no failure
        self.replace(module.Agent, "iter", _iterate)
        record_calls(self, manager, "execute_tool_call", _tool, on_result=set_tool_result, harmless=postponing)


def _iterate(
    original: Callable[..., AbstractAsyncContextManager[object]], agent: object, /, *args: object, **kwargs: object
) -> AbstractAsyncContextManager[object]:
    return _running(agent, original(agent, *args, **kwargs))


@asynccontextmanager
async def _running(agent: Any, run: AbstractAsyncContextManager[object]) -> AsyncIterator[object]:
    """A run of the agent, in whose context its model requests and tools work; PydanticAI calls unnamed ones so too."""
    name = agent.name or "agent"
    with recorded(PydanticAIPatch.name, lambda: agent_step(name, attributes={"pydantic_ai.agent.name": name})):
        async with run as agent_run:
            yield agent_run


def _tool(_manager: object, validated: Any, *_args: object, **_kwargs: object) -> Step:
    call = validated.call
    return tool_step(call.tool_name, call.args, call_id=call.tool_call_id)
