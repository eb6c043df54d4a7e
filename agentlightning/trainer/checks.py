"""What users hand to a Trainer, checked: the agent, the data sets, arguments that have another name now."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.litagent import AgentRouter, LitAgent, Route
from agentlightning.litagent.calling import name_of
from agentlightning.litagent.decorator import FunctionalLitAgent
from agentlightning.litagent.router import Predicate
from agentlightning.litagent.scoping import check_agent_name
from agentlightning.litagent.signature import check_signature
from agentlightning.utils.deprecation import deprecated

__all__ = ["check_dataset", "checked_agent", "checked_route", "combined", "renamed"]

_Value = TypeVar("_Value")


def renamed(new: str, value: _Value | None, old: str, old_value: _Value | None) -> _Value | None:
    """The value of an argument that had another name."""
    if old_value is None:
        return value
    deprecated(f"Argument '{old}' of Trainer is deprecated; use '{new}'.", stacklevel=4)
    if value is not None and value != old_value:
        deprecated(f"Both '{new}' and '{old}' are given; '{old}' is ignored.", stacklevel=4)
    return old_value if value is None else value


def checked_agent(agent: Any) -> LitAgent[Any]:
    """The agent, or a plain function as one: it is given its task, and what else it asks for by name."""
    if inspect.isfunction(agent):
        agent = FunctionalLitAgent(agent)
    if isinstance(agent, LitAgent):
        check_signature(agent)
        return agent
    hint = "derive it from LitAgent, or give a function"
    if isinstance(agent, type) and issubclass(agent, LitAgent):
        hint = f"make an instance: {agent.__name__}()"
    raise ConfigurationError(f"The agent must be a LitAgent; {agent!r} is none: {hint}.")


def checked_route(agent: Any, name: str | None, when: Predicate | None, others: Sequence[Route]) -> Route:
    """An agent beside others, under a name of its own: the given one, or that of its function or class."""
    agent, taken = checked_agent(agent), {route.name for route in others}
    if name is None:
        base = name_of(agent)
        numbered = (f"{base}-{number}" for number in range(2, len(taken) + 3))
        name = base if base not in taken else next(each for each in numbered if each not in taken)
    check_agent_name(name)
    if name in taken:
        raise ConfigurationError(f"Two agents are called '{name}'; give one of them another name.")
    if when is not None and not callable(when):
        raise ConfigurationError(f"`when` of agent '{name}' must be a function of the task; it is {when!r}.")
    return Route(name, agent, when)


def combined(routes: Sequence[Route]) -> LitAgent[Any]:
    """The registered agents as one; the first without a rule of its own takes what is left."""
    first = routes[0]
    if len(routes) == 1 and first.matches is None and first.name == name_of(first.agent):
        return first.agent
    default = next((route.name for route in routes if route.matches is None), None)
    return AgentRouter(routes, default=default, by_name=len(routes) > 1)


def check_dataset(label: str, dataset: Any) -> None:
    if isinstance(dataset, (str, bytes)):
        raise ConfigurationError(f"{label} is the text {dataset!r:.80}; read the tasks into a list first.")
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)
    if dataset is None or is_indexed:
        return
    raise ConfigurationError(
        f"{label} must have a length and give its samples by number, as a list does; a {type(dataset).__name__} does "
        "not. Make a list of it: list(...)."
    )
