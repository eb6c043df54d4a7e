"""Claims: a rollout from the queue, and all that a runner needs to begin with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.types import AttemptedRollout, ResourcesUpdate

__all__ = ["RUNNING_ATTEMPTS", "Claim", "ResourcesVersion", "claim_with"]


RUNNING_ATTEMPTS: Final = "running_attempts"
"""In the statistics of a heartbeat: pairs of the ids of rollout and attempt that the worker works on."""

ResourcesVersion = tuple[str, int]
"""Id and version: resources as they were published once."""


@dataclass(frozen=True)
class Claim:
    """A claimed rollout with its resources."""

    rollout: AttemptedRollout
    version: ResourcesVersion | None = None
    """Its resources: those it names or, if it names none, the latest when it was claimed; None if there are none."""
    resources: ResourcesUpdate | None = None
    """What they are, unless the caller said that it knows this version."""


def claim_with(
    rollout: AttemptedRollout, resources: ResourcesUpdate | None, known: Sequence[ResourcesVersion]
) -> Claim:
    """A claim that tells the resources only to those who do not know them."""
    if resources is None:
        return Claim(rollout)
    version = (resources.resources_id, resources.version)
    return Claim(rollout, version, None if version in known else resources)
