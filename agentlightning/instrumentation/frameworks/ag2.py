"""ag2 below 1.0, the continuation of AutoGen 0.2 (`import autogen`): chats, the agents that reply in them, and tools.

A chat is a step, and so is each reply: the agent's name stands above the model calls and tools that make the reply. A
call that an agent makes outside of a reply, as for the summary of a chat, gets a step of its own. What ag2 answers from
its cache is no model call and leaves none. ag2 from 1.0 on (`import ag2`) is another library; who imports it is told
that its agents and tools are not recorded.
"""

from types import ModuleType
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import StatusCode

from agentlightning.instrumentation.patch import Patch
from agentlightning.instrumentation.steps import (
    AGENT_NAME,
    Step,
    agent_step,
    record_calls,
    set_tool_result,
    tool_step,
)

__all__ = ["AG2Patch", "NewerAG2Patch"]


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
    """ag2 from 1.0 on, of which nothing is known but its name."""

    name = "ag2"
    module = "ag2"

    def change(self, module: ModuleType) -> None:
        major = self._version().partition(".")[0]
        if major.isdecimal() and int(major) > 0:  # not a module of the program that has the same name
            raise NotImplementedError("agents and tools are known of ag2 below 1.0")


def _chat(sender: Any, /, recipient: Any, *_args: Any, **_kwargs: Any) -> Step:
    between = {"ag2.chat.sender": sender.name, "ag2.chat.recipient": recipient.name}
    return Step(f"{sender.name}.chat", between)


def _reply(agent: Any, /, *_args: Any, **_kwargs: Any) -> Step:
    return agent_step(agent.name)


def _model_call(_client: Any, /, *, agent: Any = None, **_config: Any) -> Step | None:
    """None within a reply of the agent, whose step is open."""
    attributes = getattr(trace.get_current_span(), "attributes", None) or {}
    is_replying = agent is not None and attributes.get(AGENT_NAME) == getattr(agent, "name", None)
    return None if agent is None or is_replying else agent_step(agent.name)


def _tool(_agent: Any, /, func_call: Any, call_id: str | None = None, *_args: Any, **_kwargs: Any) -> Step:
    return tool_step(str(func_call.get("name", "")), func_call.get("arguments", "{}"), call_id=call_id)


def _record_outcome(step: Step, outcome: Any) -> None:
    """A tool that fails does not raise here: ag2 tells the model what went wrong."""
    is_done, message = outcome
    set_tool_result(step, message["content"])
    if not is_done:
        step.span.set_status(StatusCode.ERROR, str(message["content"]))
