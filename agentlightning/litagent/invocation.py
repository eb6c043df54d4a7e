"""How an agent is called: coroutines are awaited, plain methods run in a thread, with the resources of the agent.

While it runs, model calls it makes with clients of its own go to the models of its resources; see `redirection`.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning.litagent.litagent import LitAgent, current_claim
from agentlightning.litagent.redirection import redirecting, router_for
from agentlightning.types import LLM, NamedResources, Rollout, RolloutRawResult, TaskInput
from agentlightning.types.scoping import scoped_to
from agentlightning.utils.daemon_threads import DaemonThreads
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)

RolloutMethod = Literal["rollout", "training_rollout", "validation_rollout"]


@dataclass(frozen=True)
class AgentMethod:
    """What to call for a purpose, and how."""

    call: Callable[..., Any]
    is_coroutine: bool
    agent_name: str | None = None
    """The agent whose resources are meant, where they are scoped."""


def name_of(agent: LitAgent[TaskInput]) -> str:
    """The name of an agent that has not been given one: that of its function, or of its class."""
    return str(getattr(agent, "__name__", type(agent).__name__))


def method_of(agent: LitAgent[TaskInput], method: RolloutMethod) -> AgentMethod:
    """The agent's own method for this purpose before its general one, the coroutine before the plain."""
    own = [name for name in (f"{method}_async", method) if method != "rollout" and agent.overrides(name)]
    is_written_async = agent.overrides("rollout_async") and agent.is_async()
    name = own[0] if own else f"{method}_async" if is_written_async else method
    call: Callable[..., object] = getattr(agent, name)
    leads_to_coroutine = not agent.overrides(name) and inspect.iscoroutinefunction(type(agent).rollout)
    return AgentMethod(call, inspect.iscoroutinefunction(call) or leads_to_coroutine, name_of(agent))


async def call_agent(
    method: AgentMethod, *, task: TaskInput, resources: NamedResources, rollout: Rollout, threads: DaemonThreads
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


async def call_callback(agent: LitAgent[TaskInput], name: str, *arguments: object) -> None:
    """Call a callback of an agent, plain or a coroutine function; what it raises is logged and fails nothing."""
    with log_failures(logger, "%s.%s failed.", type(agent).__name__, name, exits=True):
        pending = getattr(agent, name)(*arguments)
        if inspect.isawaitable(pending):
            await pending


def with_claimed_keys(resources: NamedResources) -> NamedResources:
    """The resources with the keys that the current claim brought in the place of references to them."""
    claim = current_claim()
    keys = {} if claim is None else claim.proxy_keys
    bound = dict(resources)
    for name, resource in resources.items() if keys else ():
        if isinstance(resource, LLM) and resource.api_key is not None and resource.api_key in keys:
            bound[name] = resource.model_copy(update={"api_key": keys[resource.api_key]})
    return bound
