"""ag2 below 1.0, the continuation of AutoGen 0.2 (`import autogen`): chats, the agents that reply in them, and tools.

A chat is a step, and so is each reply: the agent's name stands above the model calls and tools that make the reply. A
call that an agent makes outside of a reply, as for the summary of a chat, gets a step of its own. What ag2 answers from
its cache is no model call and leaves none. ag2 from 1.0 on (`import ag2`) is another library; who imports it is told
that its agents and tools are not recorded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import StatusCode

from agentlightning.instrumentation.guard import guarded
from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.spans import AGENT_NAME, Step, agent_step, is_suppressed, set_tool_result, tool_step

__all__ = ["AG2Patch", "NewerAG2Patch"]

_AG2: Final = "ag2"


class AG2Patch(Patch):
    name = _AG2
    module = "autogen.agentchat.conversable_agent"  # `autogen` alone may well be a module of the program
    distribution = "ag2"

    def change(self, module: ModuleType) -> None:
        agent = module.ConversableAgent
        self.replace(agent, "initiate_chat", _chat)
        self.replace(agent, "a_initiate_chat", _chat_async)
        self.replace(agent, "generate_reply", _reply)
        self.replace(agent, "a_generate_reply", _reply_async)
        self.replace(agent, "execute_function", _execute)
        self.replace(agent, "a_execute_function", _execute_async)
        self.replace(module.OpenAIWrapper, "create", _ask_model)


class NewerAG2Patch(Patch):
    """ag2 from 1.0 on, of which nothing is known but its name."""

    name = _AG2
    module = "ag2"

    def change(self, module: ModuleType) -> None:
        major = self._version().partition(".")[0]
        if major.isdecimal() and int(major) > 0:  # not a module of the program that has the same name
            raise NotImplementedError("agents and tools are known of ag2 below 1.0")


def _opened(open_step: Callable[[], Step]) -> AbstractContextManager[Step | None]:
    if not is_suppressed():
        with guarded(_AG2):
            return open_step()
    return nullcontext()


# ---------------------------------------------------------------------- chats and replies


def _chat(original: Callable[..., Any], sender: Any, /, recipient: Any, *args: Any, **kwargs: Any) -> Any:
    with _opened(lambda: _chat_step(sender, recipient)):
        return original(sender, recipient, *args, **kwargs)


async def _chat_async(original: Callable[..., Any], sender: Any, /, recipient: Any, *args: Any, **kwargs: Any) -> Any:
    with _opened(lambda: _chat_step(sender, recipient)):
        return await original(sender, recipient, *args, **kwargs)


def _chat_step(sender: Any, recipient: Any) -> Step:
    between = {"ag2.chat.sender": sender.name, "ag2.chat.recipient": recipient.name}
    return Step(f"{sender.name}.chat", between)


def _reply(original: Callable[..., Any], agent: Any, /, *args: Any, **kwargs: Any) -> Any:
    with _opened(lambda: agent_step(agent.name)):
        return original(agent, *args, **kwargs)


async def _reply_async(original: Callable[..., Any], agent: Any, /, *args: Any, **kwargs: Any) -> Any:
    with _opened(lambda: agent_step(agent.name)):
        return await original(agent, *args, **kwargs)


def _ask_model(original: Callable[..., Any], client: Any, /, **config: Any) -> Any:
    agent = config.get("agent")
    if agent is None or _is_replying(agent):
        return original(client, **config)
    with _opened(lambda: agent_step(agent.name)):
        return original(client, **config)


def _is_replying(agent: Any) -> bool:
    attributes = getattr(trace.get_current_span(), "attributes", None) or {}
    return bool(attributes.get(AGENT_NAME) == getattr(agent, "name", None))


# ---------------------------------------------------------------------- tools


def _execute(original: Callable[..., Any], agent: Any, /, func_call: Any, *args: Any, **kwargs: Any) -> Any:
    with _opened(lambda: _tool_step(func_call, *args, **kwargs)) as step:
        outcome = original(agent, func_call, *args, **kwargs)
        _tell_outcome(step, outcome)
        return outcome


async def _execute_async(original: Callable[..., Any], agent: Any, /, func_call: Any, *args: Any, **kwargs: Any) -> Any:
    with _opened(lambda: _tool_step(func_call, *args, **kwargs)) as step:
        outcome = await original(agent, func_call, *args, **kwargs)
        _tell_outcome(step, outcome)
        return outcome


def _tool_step(func_call: Any, call_id: str | None = None, *_args: Any, **_kwargs: Any) -> Step:
    return tool_step(str(func_call.get("name", "")), func_call.get("arguments", "{}"), call_id=call_id)


def _tell_outcome(step: Step | None, outcome: Any) -> None:
    """A tool that fails does not raise here: ag2 tells the model what went wrong."""
    if step is not None:
        with guarded(_AG2):
            is_done, message = outcome
            set_tool_result(step, message["content"])
            if not is_done:
                step.span.set_status(StatusCode.ERROR, str(message["content"]))
