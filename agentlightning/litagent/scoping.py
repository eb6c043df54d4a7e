"""Resources of one agent among several, as they are in the store; the rules are in `agentlightning.types.scoping`."""

from agentlightning.errors import RolloutFailed
from agentlightning.store.base import LightningStore
from agentlightning.types import NamedResources
from agentlightning.types.scoping import PINNED_RESOURCES, check_agent_name, pinned_id, resources_for

__all__ = ["PINNED_RESOURCES", "check_agent_name", "pinned_id", "resolve", "resources_for"]


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
    return resources_for(agent_name, update.resources)
