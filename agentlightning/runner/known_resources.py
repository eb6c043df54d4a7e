"""Resources that a runner has seen: kept, so that the store need not send them with every claim."""

from collections import OrderedDict
from typing import Final

from agentlightning.store.claims import Claim, ResourcesVersion
from agentlightning.store.values import own_resources
from agentlightning.types import NamedResources

__all__ = ["KnownResources"]

MOST_KEPT: Final = 8


class KnownResources:
    """The versions that were needed last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ResourcesVersion, NamedResources] = OrderedDict()

    @property
    def versions(self) -> list[ResourcesVersion]:
        return list(self._kept)

    def of(self, claim: Claim) -> NamedResources | None:
        """The resources of a claim, as the caller's own; None if there are none, or they are not kept."""
        version = claim.version
        if version is None:
            return None
        if claim.resources is not None:
            self._kept[version] = claim.resources.resources
        kept = self._kept.get(version)
        if kept is None:
            return None
        self._kept.move_to_end(version)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return own_resources(kept)
