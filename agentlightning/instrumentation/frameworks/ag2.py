"""ag2, which is two libraries: below 1.0 the continuation of AutoGen 0.2 (`import autogen`), from 1.0 on `import ag2`.

Below 1.0 a chat is a step, and so is each reply: the agent's name stands above the model calls and tools that make the
reply. A call that an agent makes outside of a reply, as for the summary of a chat, gets a step of its own. What ag2
answers from its cache is no model call and leaves none.

From 1.0 on a turn of an agent is a step, whichever way it was started; its model calls and tools are beneath.
"""

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import StatusCode

from agentlightning.instrumentation.patch import (
    AGENT_NAME,
    Patch,
    Step,
    agent_step,
    record_calls,
    recorded,
    set_tool_result,
    tool_step,
)


class AG2Patch(Patch):
    name = "ag2"
    module = "autogen.agentchat.conversable_agent"  # `autogen` alone may well be a module of the program
    distribution = "ag2"

    def change(self, module: ModuleType) -> None:
        agent = module.ConversableAgent
        for prefix in ("", "a_"):
            record_calls(self, agent, f"{prefix}initiate_chat", _chat)
            record_calls(self, agent, f"{prefix}generate_reply", _reply)
            record_calls(self, agent, f"{prefix}execute_function", _tool, on_result=_record_outcome)
        record_calls(self, module.OpenAIWrapper, "create", _model_call)


class NewerAG2Patch(Patch):
    """ag2 from 1.0 on."""

    name = "ag2"
    module = "ag2"

    def change(self, module: ModuleType) -> None:
        if self._version()[0] in "(0":
            return  # a module of the program that has the same name
        executor = importlib.import_module("ag2.tools.executor")
        self.replace(module.Agent, "_drive_scope", _turn_scope)
        record_calls(self, executor, "_execute_call", _newer_tool, on_result=_record_event)


def _chat(sender: Any, /, recipient: Any, *_args: object, **_kwargs: object) -> Step:
    between = {"ag2.chat.sender": sender.name, "ag2.chat.recipient": recipient.name}
    return Step(f"{sender.name}.chat", between)


def _reply(agent: Any, /, *_args: object, **_kwargs: object) -> Step:
    return agent_step(agent.name, attributes={"ag2.agent.name": agent.name})


def _model_call(_client: object, /, *, agent: Any = None, **_config: object) -> Step | None:
    """None within a reply of the agent, whose step is open."""
    attributes = getattr(trace.get_current_span(), "attributes", None) or {}
    is_replying = agent is not None and attributes.get(AGENT_NAME) == getattr(agent, "name", None)
    return None if agent is None or is_replying else agent_step(agent.name)


def _tool(_agent: object, /, func_call: Any, call_id: str | None = None, *_args: object, **_kwargs: object) -> Step:
    return tool_step(str(func_call.get("name", "")), func_call.get("arguments", "{}"), call_id=call_id)


def _record_outcome(step: Step, outcome: Any) -> None:
    """A tool that fails does not raise here: ag2 tells the model what went wrong."""
    is_done, message = outcome
    set_tool_result(step, message["content"])
    if not is_done:
        step.span.set_status(StatusCode.ERROR, str(message["content"]))


# ---------------------------------------------------------------------- from 1.0 on

_Turn = Callable[[], Awaitable[Any]]


def _turn_scope(
    original: Callable[..., AbstractAsyncContextManager[_Turn]], agent: object, /, *args: object, **kwargs: object
) -> AbstractAsyncContextManager[_Turn]:
    return _recorded_turn(agent, original(agent, *args, **kwargs))


@asynccontextmanager
async def _recorded_turn(agent: Any, scope: AbstractAsyncContextManager[_Turn]) -> AsyncIterator[_Turn]:
    """The scope of a turn, in which the program may subscribe to events before it has the turn taken."""
    async with scope as take_turn:

        async def recorded_turn() -> Any:
            attributes = {"ag2.agent.name": agent.name}
            with recorded(NewerAG2Patch.name, lambda: agent_step(agent.name, attributes=attributes)):
                return await take_turn()

        yield recorded_turn


def _newer_tool(_context: object, /, call: Any) -> Step:
    return tool_step(call.name, call.arguments, call_id=call.id)


def _record_event(step: Step, event: object) -> None:
    """A tool that fails does not raise here: ag2 tells the model. A tool that the client is to run has no result."""
    if (error := getattr(event, "error", None)) is not None:
        step.end(error=error)
    elif (result := getattr(event, "result", None)) is not None:
        parts = [getattr(part, "content", getattr(part, "data", None)) for part in result.parts]
        set_tool_result(step, parts[0] if len(parts) == 1 else parts)
