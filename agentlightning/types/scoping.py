"""Resources of one agent among several: its own, and for the rest those of everybody.

A name such as `writer/llm` belongs to the agent `writer`, which sees it as `llm`; a name without a scope is a default
for all. An agent's own entry takes the place of the default of its name. What an `LLM` of its own leaves open is taken
from the default: an empty `endpoint` or `model`, and single sampling parameters. So

    {
        "llm": LLM(endpoint=url, model="large"),
        "critic/llm": LLM(endpoint="", model="", sampling_parameters={"temperature": 0}),
    }

gives the critic the same model at another temperature.

An agent may be *pinned* to resources of a certain id, while others follow what is published: by the rollout's metadata,
`{"pinned_resources": {"critic": "rs-1f2e"}}`. It then sees these resources and no others, defaults included.
"""

from collections.abc import Mapping
from typing import Final

from agentlightning.errors import ConfigurationError
from agentlightning.types.core import Rollout
from agentlightning.types.resources import LLM, NamedResources, ResourceUnion

__all__ = ["PINNED_RESOURCES", "SEPARATOR", "check_agent_name", "pinned_id", "resources_for", "scoped_to"]

PINNED_RESOURCES: Final = "pinned_resources"
"""Key of a rollout's metadata: ids of resources by names of agents."""
SEPARATOR: Final = "/"
"""Between the name of an agent and that of its resource."""


def resources_for(agent_name: str | None, resources: NamedResources) -> NamedResources:
    """What an agent sees, its own entries first; None, an agent without a name, sees the defaults alone."""
    defaults = {name: resource for name, resource in resources.items() if SEPARATOR not in name}
    if agent_name is None or len(defaults) == len(resources):
        return defaults
    scope = agent_name + SEPARATOR
    own = {name.removeprefix(scope): resource for name, resource in resources.items() if name.startswith(scope)}
    completed = {name: _completed(agent_name, name, resource, defaults.get(name)) for name, resource in own.items()}
    return {**completed, **{name: resource for name, resource in defaults.items() if name not in own}}


def scoped_to(agent_name: str | None, resources: NamedResources) -> NamedResources:
    """The resources as an agent gets them: its own under their plain names, those of other scopes as they are.

    An agent may itself be a team, whose members get theirs by `resources_for(member, resources)`.
    """
    if agent_name is None or not any(SEPARATOR in name for name in resources):
        return resources
    scope = agent_name + SEPARATOR
    others = {n: resource for n, resource in resources.items() if SEPARATOR in n and not n.startswith(scope)}
    return {**resources_for(agent_name, resources), **others}


def pinned_id(agent_name: str, rollout: Rollout) -> str | None:
    """The resources that a rollout pins an agent to; None if it does not."""
    pins: object = (rollout.metadata or {}).get(PINNED_RESOURCES, {})
    pinned_to = pins.get(agent_name) if isinstance(pins, Mapping) else pins
    if not isinstance(pins, Mapping) or not isinstance(pinned_to, str | None):
        raise ConfigurationError(
            f"The metadata '{PINNED_RESOURCES}' of rollout '{rollout.rollout_id}' must give ids of resources by names "
            f"of agents, for example {{'critic': 'rs-1f2e'}}; it is {pins!r}."
        )
    return pinned_to


def check_agent_name(name: object) -> None:
    """Refuse a name that cannot be a scope."""
    if not isinstance(name, str) or not name or SEPARATOR in name:
        raise ConfigurationError(
            f"An agent cannot be called {name!r}: its name must be a text that is not empty, and '{SEPARATOR}' "
            "separates it from those of its resources."
        )


def _completed(agent_name: str, name: str, own: ResourceUnion, default: ResourceUnion | None) -> ResourceUnion:
    """An agent's own entry, with what it leaves open taken from the default."""
    if not isinstance(own, LLM):
        return own
    endpoint = str(vars(own)["endpoint"])  # read as an attribute, that of a ProxyLLM warns
    if not isinstance(default, LLM):
        if not endpoint or not own.model:
            raise ConfigurationError(
                f"The LLM '{agent_name}{SEPARATOR}{name}' leaves its endpoint or its model to the default, and there "
                f"is no LLM called '{name}'; publish one, or name both."
            )
        return own
    sampling = {**default.sampling_parameters, **own.sampling_parameters}
    model = own.model or default.model
    if endpoint:  # the default's key is for the default's endpoint alone
        return own.model_copy(update={"model": model, "sampling_parameters": sampling})
    changes: dict[str, object] = {"model": model, "sampling_parameters": sampling}
    changes["api_key"] = default.api_key if own.api_key is None else own.api_key
    changes["redirect"] = default.redirect if own.redirect is None else own.redirect
    changes["redirect_exclude"] = own.redirect_exclude or default.redirect_exclude
    return default.model_copy(update=changes)
