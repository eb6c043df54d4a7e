"""Calling an agent as it is written: coroutines are awaited, plain methods run in a thread.

While it runs, model calls it makes with clients of its own go to the models of its resources; see `redirection`.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from agentlightning.litagent.litagent import LitAgent
from agentlightning.litagent.redirection import redirecting, router_for
from agentlightning.types import NamedResources, Rollout, RolloutRawResult, TaskInput
from agentlightning.utils.daemon_threads import DaemonThreads

__all__ = ["RolloutMethod", "call_agent"]

RolloutMethod = Literal["rollout", "training_rollout", "validation_rollout"]


async def call_agent(
    agent: LitAgent[Any],
    method: RolloutMethod,
    *,
    task: TaskInput,
    resources: NamedResources,
    rollout: Rollout,
    threads: DaemonThreads,
) -> RolloutRawResult:
    """Have an agent do a task, by the method of that name or by the coroutine it is written as."""
    name = _name_of(agent, method)
    call: Callable[..., Any] = getattr(agent, name)
    leads_to_coroutine = not _is_own(agent, name) and inspect.iscoroutinefunction(type(agent).rollout)
    result: RolloutRawResult
    with redirecting(router_for(rollout, resources, agent_name=getattr(agent, "__name__", None))):
        if inspect.iscoroutinefunction(call) or leads_to_coroutine:
            result = await call(task, resources=resources, rollout=rollout)
        else:
            result = await threads.run(lambda: call(task, resources=resources, rollout=rollout))
    return result


def _name_of(agent: LitAgent[Any], method: RolloutMethod) -> str:
    """What to call: the agent's own method for this purpose before its general one, the coroutine before the plain."""
    if method != "rollout":
        for name in (f"{method}_async", method):
            if _is_own(agent, name):
                return name
    is_coroutine = _is_own(agent, "rollout_async") and agent.is_async()
    return f"{method}_async" if is_coroutine else method


def _is_own(agent: LitAgent[Any], name: str) -> bool:
    return getattr(type(agent), name) is not getattr(LitAgent, name)
