"""Calling an agent as it is written: coroutines are awaited, plain methods run in a thread.

While it runs, model calls it makes with clients of its own go to the models of its resources; see `redirection`.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning.litagent.litagent import LitAgent
from agentlightning.litagent.redirection import redirecting, router_for
from agentlightning.litagent.scoping import scoped_to
from agentlightning.types import NamedResources, Rollout, RolloutRawResult, TaskInput
from agentlightning.utils.daemon_threads import DaemonThreads

__all__ = ["AgentMethod", "RolloutMethod", "call_agent", "call_callback", "method_of", "name_of"]

logger = logging.getLogger(__name__)

RolloutMethod = Literal["rollout", "training_rollout", "validation_rollout"]


@dataclass(frozen=True)
class AgentMethod:
    """What to call for a purpose, and how."""

    call: Callable[..., Any]
    is_coroutine: bool
    agent_name: str | None = None
    """Whose resources are meant, where they are scoped."""


def name_of(agent: LitAgent[Any]) -> str:
    """What an agent is called where nobody names it: as its function, or as its class."""
    return str(getattr(agent, "__name__", type(agent).__name__))


def method_of(agent: LitAgent[Any], method: RolloutMethod) -> AgentMethod:
    """The method of that name, or the coroutine it is written as."""
    name = _method_name(agent, method)
    call: Callable[..., Any] = getattr(agent, name)
    leads_to_coroutine = not _is_own(agent, name) and inspect.iscoroutinefunction(type(agent).rollout)
    is_coroutine = inspect.iscoroutinefunction(call) or leads_to_coroutine
    return AgentMethod(call, is_coroutine, name_of(agent))


async def call_agent(
    method: AgentMethod,
    *,
    task: TaskInput,
    resources: NamedResources,
    rollout: Rollout,
    threads: DaemonThreads,
) -> RolloutRawResult:
    """Have an agent do a task, with the resources of its own scope under their plain names."""
    result: RolloutRawResult
    resources = scoped_to(method.agent_name, resources)
    with redirecting(router_for(rollout, resources, agent_name=method.agent_name)):
        if method.is_coroutine:
            result = await method.call(task, resources=resources, rollout=rollout)
        else:
            result = await threads.run(lambda: method.call(task, resources=resources, rollout=rollout))
    return result


async def call_callback(agent: LitAgent[Any], name: str, *arguments: Any) -> None:
    """Call a callback of an agent, plain or a coroutine function; what it raises is logged and fails nothing."""
    try:
        pending = getattr(agent, name)(*arguments)
        if inspect.isawaitable(pending):
            await pending
    except (Exception, SystemExit):  # the rollout is not to blame
        logger.exception("%s.%s failed.", type(agent).__name__, name)


def _method_name(agent: LitAgent[Any], method: RolloutMethod) -> str:
    """What to call: the agent's own method for this purpose before its general one, the coroutine before the plain."""
    if method != "rollout":
        for name in (f"{method}_async", method):
            if _is_own(agent, name):
                return name
    is_coroutine = _is_own(agent, "rollout_async") and agent.is_async()
    return f"{method}_async" if is_coroutine else method


def _is_own(agent: LitAgent[Any], name: str) -> bool:
    return getattr(type(agent), name) is not getattr(LitAgent, name)
