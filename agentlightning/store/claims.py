"""Claims: a rollout from the queue, and all that a runner needs to begin with it; and the ids of claims.

The id of a claim is a slot and a counter. A worker makes one claim after the other in each of its slots, with a higher
counter each time, so that the last claim of each slot is all that a store must keep to know a repeated one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.types import AttemptedRollout, ResourcesUpdate

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
    token: str | None = field(default=None, repr=False, compare=False)
    """For programs that the attempt runs: permits to write its spans. The server that answers signs it; a store never
    keeps it, and a server without a token gives none."""
    proxy_keys: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The attempt's keys for LLM proxies by the references that stand in `resources` in the place of the proxies'
    secrets; empty for a caller who reads the secrets themselves."""

    def __getstate__(self) -> dict[str, object]:
        """Without the credentials: a pickle may be kept, or go where the attempt does not."""
        return {**vars(self), "token": None, "proxy_keys": {}}


def claim_with(
    rollout: AttemptedRollout, resources: ResourcesUpdate | None, known: Sequence[ResourcesVersion]
) -> Claim:
    """A claim that tells the resources only to those who do not know them."""
    if resources is None:
        return Claim(rollout)
    version = (resources.resources_id, resources.version)
    return Claim(rollout, version, None if version in known else resources)


def claimed_ids(result: Any) -> list[tuple[str, str]]:
    """Ids of rollout and attempt in the result of an operation that gives out rollouts."""
    given = result if isinstance(result, list) else [result] if result is not None else []
    rollouts: list[AttemptedRollout] = [claim.rollout if isinstance(claim, Claim) else claim for claim in given]
    return [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in rollouts]


MOST_CLAIM_SLOTS: Final = 128
"""Of one worker; the one that was used longest ago is forgotten."""
_MOST_DIGITS: Final = 18


def slot_of(claim_id: str) -> tuple[str, int]:
    """Slot and counter of the id of a claim, `SLOT:COUNTER`; an id of another form is a slot of its own."""
    slot, separator, counter = claim_id.rpartition(":")
    if separator and counter.isascii() and counter.isdecimal() and len(counter) <= _MOST_DIGITS:
        return slot, int(counter)
    return claim_id, 0
