"""Resources of one agent among several, as they are in the store; the rules are in `agentlightning.types.scoping`."""

from agentlightning.errors import RolloutFailed
from agentlightning.litagent.litagent import current_claim
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, NamedResources
from agentlightning.types.scoping import (
    PINNED_RESOURCES,
    SEPARATOR,
    check_agent_name,
    pinned_id,
    resources_for,
    scoped_to,
)

__all__ = [
    "PINNED_RESOURCES",
    "SEPARATOR",
    "check_agent_name",
    "pinned_id",
    "resolve",
    "resources_for",
    "scoped_to",
    "with_claimed_keys",
]


async def resolve(
    store: LightningStore, resources: NamedResources, agent_name: str, *, pinned_to: str | None = None
) -> NamedResources:
    """As `resources_for`, of the resources that the agent is pinned to, if it is."""
    if pinned_to is None:
        return resources_for(agent_name, resources)
    update = await store.get_resources_by_id(pinned_to)
    if update is None:
        raise RolloutFailed(
            f"Agent '{agent_name}' is pinned to the resources '{pinned_to}', which the store does not have; "
            "pin it to others, or to none."
        )
    return resources_for(agent_name, with_claimed_keys(update.resources))


def with_claimed_keys(resources: NamedResources) -> NamedResources:
    """The resources with the keys that the current claim brought in the place of references to them."""
    claim = current_claim()
    keys = {} if claim is None else claim.proxy_keys
    if not keys:
        return resources
    bound = dict(resources)
    for name, resource in resources.items():
        if isinstance(resource, LLM) and resource.api_key is not None and resource.api_key in keys:
            bound[name] = resource.model_copy(update={"api_key": keys[resource.api_key]})
    return bound
