"""How an agent is called, alone or as one of several: coroutines are awaited, plain methods run in a thread, with the
resources of the agent.

While it runs, model calls it makes with clients of its own go to the models of its resources; see `redirection`.

`AgentRouter` is one agent made of several, each of which takes the tasks that are meant for it.

    AgentRouter({"sql": (lambda task: "query" in task, sql_agent), "math": (is_sum, math_agent)}, default=chat_agent)

The first route that matches a task takes it; with `by_name`, a task that names one of the agents goes to that one. Its
agent is called as it is written, plain or as coroutines, for training or validation, with its callbacks and with the
resources of its own scope. What it does stands below a span `<name>.agent` that names the agent as OpenTelemetry's
conventions do, so that `agent_match="sql"` finds it, and the reward that it returns carries the same name.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from agentlightning.errors import ConfigurationError, RolloutFailed
from agentlightning.litagent.litagent import LitAgent, current_claim, current_work
from agentlightning.litagent.redirection import redirecting, router_for
from agentlightning.semconv import AGENT_NAME
from agentlightning.tracer import get_active_tracer
from agentlightning.types import LLM, Attributes, NamedResources, Rollout, RolloutRawResult, Task, TaskInput
from agentlightning.types.resources import check_agent_name, pinned_id, resources_for, scoped_to
from agentlightning.utils.daemon_threads import DaemonThreads
from agentlightning.utils.json_values import JsonMapping
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


# ---------------------------------------------------------------------- several agents


T = TypeVar("T")

Predicate = Callable[[Any], bool | Awaitable[bool]]
"""Whether a task is meant for an agent; may be a coroutine function, for example to ask a model."""
DEFAULT_NAME: Final = "default"
"""What an agent is called that takes what no route takes."""
AGENT_FIELD: Final = "agent"
"""The field of a task, or of a `Task`'s metadata, that names the agent."""
_LONGEST_NAME: Final = 80
"""Characters of a name that are shown."""
_CALLBACKS: Final = ("on_rollout_start", "on_rollout_end")


@dataclass(frozen=True)
class Route:
    """Tasks for an agent."""

    name: str
    """What the agent is called in traces and in the names of its resources."""
    agent: LitAgent[TaskInput]
    matches: Predicate | None = None
    """None takes no task by itself: only the default, or those that name it."""
    resources_id: str | None = None
    """Pins the agent to these resources, whatever the others get; the rollout's metadata wins over this."""


@dataclass
class _Routed:
    """What a router keeps of one attempt."""

    arguments: tuple[Any, ...]
    """Of the callback `on_rollout_start`."""
    route: Route | None = None
    """None until an agent is chosen, which then gets both callbacks."""


class AgentRouter(LitAgent[T]):
    """Gives each task to the first of its agents that it matches."""

    def __init__(
        self,
        routes: Mapping[str, tuple[Predicate, LitAgent[TaskInput]]] | Sequence[Route],
        *,
        default: LitAgent[TaskInput] | str | None = None,
        by_name: bool = False,
    ) -> None:
        """Nothing is called yet.

        Args:
            routes: Predicates and agents by name, or routes; tried in this order.
            default: Takes what no route takes: an agent, under the name `default`, or the name of a route. Without it,
                such a task fails.
            by_name: A task whose field `agent` is the name of a route goes there. A name that no route has leaves the
                task to the predicates, and not to the default, which would hide a misspelt name.
        """
        super().__init__()
        self._threads = DaemonThreads("routed-agent")
        if isinstance(routes, Mapping):
            pairs: JsonMapping = routes  # users may have given anything
            for name, pair in pairs.items():
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ConfigurationError(
                        f"The route '{name}' must be a pair (predicate, agent); it is {pair!r}. To say more, give a "
                        "list of Route."
                    )
            routes = [Route(name, agent, matches) for name, (matches, agent) in pairs.items()]
        self.routes = tuple(routes)
        self.by_name = by_name
        self.default = Route(DEFAULT_NAME, default) if isinstance(default, LitAgent) else None
        if isinstance(default, str):
            named = {route.name: route for route in self.routes}
            if default not in named:
                raise ConfigurationError(f"The default {default!r} names no route; the routes are {list(named)}.")
            self.default = named[default]
        _check(self._all_routes())

    def set_trainer(self, trainer: object) -> None:
        super().set_trainer(trainer)
        for route in self._all_routes():
            route.agent.set_trainer(trainer)

    def set_runner(self, runner: object) -> None:
        super().set_runner(runner)
        for route in self._all_routes():
            route.agent.set_runner(runner)

    # ------------------------------------------------------------------ callbacks

    def has_callback(self, name: str) -> bool:
        """Whether the callback must be called: both must, if any of the agents has one."""
        return any(route.agent.has_callback(each) for route in self._all_routes() for each in _CALLBACKS)

    def on_rollout_start(self, task: Task, runner: object, tracer: object) -> None:
        """Keep the arguments for the agent, which is chosen when the task is at hand."""
        work = current_work()
        if work is not None:
            work.routed[id(self)] = _Routed((task, runner, tracer))

    def on_rollout_end(self, task: Task, rollout: object, runner: object, tracer: object) -> Awaitable[None] | None:
        work = current_work()
        routed: _Routed | None = None if work is None else work.routed.pop(id(self), None)
        if routed is None or routed.route is None:  # no agent was chosen, so none has begun
            return None
        return call_callback(routed.route.agent, "on_rollout_end", task, rollout, runner, tracer)

    # ------------------------------------------------------------------ the work

    async def choose(self, task: T) -> Route:
        """The route that takes a task."""
        fields = task.metadata if isinstance(task, Task) else task
        named = fields.get(AGENT_FIELD) if self.by_name and isinstance(fields, Mapping) else None
        name = named if isinstance(named, str) else None
        for route in self._all_routes():
            if route.name == name:
                return route
        for route in self.routes:
            if await _does_match(route, task):
                return route
        if self.default is not None and name is None:
            return self.default
        known = ", ".join(repr(route.name) for route in self._all_routes())
        if name is not None:
            raise RolloutFailed(
                f"No agent is called {name!r:.{_LONGEST_NAME}}, which {_described(task)} names in its field "
                f"'{AGENT_FIELD}'; the agents are {known}. Name one of them, or give one a predicate that matches."
            )
        raise RolloutFailed(
            f"No route takes {_described(task)}; the routes are {known}. Add one that matches, or a default."
        )

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return await self._route("rollout", task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return await self._route("training_rollout", task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        return await self._route("validation_rollout", task, resources, rollout)

    async def _route(
        self, method: RolloutMethod, task: T, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        route = await self.choose(task)
        own = await self._resources(route, resources, rollout)
        work, threads = current_work(), self._threads
        if work is not None:
            threads = work.threads or threads
            work.agent_name = route.name
            routed: _Routed | None = work.routed.get(id(self))
            if routed is not None:
                routed.route = route
                await call_callback(route.agent, "on_rollout_start", *routed.arguments)
        tracer = get_active_tracer()
        tags: Attributes = {AGENT_NAME: route.name}
        with nullcontext() if tracer is None else tracer.operation_context(f"{route.name}.agent", tags):
            chosen = method_of(route.agent, method)
            return await call_agent(chosen, task=task, resources=own, rollout=rollout, threads=threads)

    async def _resources(self, route: Route, resources: NamedResources, rollout: Rollout) -> NamedResources:
        pinned_to = pinned_id(route.name, rollout) or route.resources_id
        if pinned_to is not None:
            update = await self.get_runner().get_store().get_resources_by_id(pinned_to)
            if update is None:
                raise RolloutFailed(
                    f"Agent '{route.name}' is pinned to the resources '{pinned_to}', which the store does not have; "
                    "pin it to others, or to none."
                )
            resources = with_claimed_keys(update.resources)
        return resources_for(route.name, resources)

    def _all_routes(self) -> tuple[Route, ...]:
        is_named = any(route is self.default for route in self.routes)
        return self.routes if self.default is None or is_named else (*self.routes, self.default)


def _check(routes: Sequence[Route]) -> None:
    if not routes:
        raise ConfigurationError("AgentRouter has no routes; give it at least one, or a default.")
    names = [route.name for route in routes]
    for route in routes:
        name, matches = route.name, route.matches
        agent: Any = route.agent  # users may have given anything
        check_agent_name(name)
        if names.count(name) > 1:
            raise ConfigurationError(f"Two routes are called '{name}'; traces could not tell them apart.")
        if not isinstance(agent, LitAgent) or not (matches is None or callable(matches)):
            raise ConfigurationError(
                f"The route '{name}' needs a predicate, which is a function of the task, and an agent; it has a "
                f"{type(matches).__name__} and a {type(agent).__name__}. @rollout makes an agent of a function."
            )
        agent.check_parameters()


async def _does_match(route: Route, task: object) -> bool:
    if route.matches is None:
        return False
    try:
        answer = route.matches(task)
        return bool(await answer if inspect.isawaitable(answer) else answer)
    except Exception as error:
        raise RolloutFailed(
            f"The predicate of route '{route.name}' raised {type(error).__name__} for {_described(task)}: {error}"
        ) from error


def _described(task: object) -> str:
    """A task without what is in it, which may be long or private."""
    if isinstance(task, Mapping):
        return f"a task with the keys {', '.join(map(repr, task))}" if task else "an empty task"
    return f"a task of type {type(task).__name__}"
