"""What a store can do for a runner: those written for an earlier release, or by others, can do less."""

import inspect
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.store.base import LightningStore
from agentlightning.store.capabilities import is_unable
from agentlightning.store.forwarding import LightningStoreThreaded

__all__ = ["Abilities", "innermost", "is_unable"]

_CLAIMING: Final = ("dequeue_rollout", "dequeue_many_rollouts", "get_latest_resources", "get_resources_by_id")
_FINISHING: Final = ("finish_attempt", "update_attempt", "add_many_spans")


@dataclass
class Abilities:
    """What may be asked of a store; nothing, unless it says so."""

    waits: bool = False
    """For work, instead of being asked again and again."""
    names_claimers: bool = False
    names_starters: bool = False
    has_batches: bool = False
    tells_resources: bool = False
    """Together with a claim."""
    finishes_at_once: bool = False
    """Takes the last spans of an attempt and its status as one step."""
    claims_next: bool = False
    """In the step that finishes an attempt."""
    takes_back: bool = False
    """Claims that were not begun with."""
    keeps_outputs: bool = False
    """Of rollouts, as a field of their own."""

    @classmethod
    def of(cls, store: LightningStore) -> "Abilities":
        kind, inner = type(innermost(store)), innermost(store)
        has_batches = kind.dequeue_many_rollouts is not LightningStore.dequeue_many_rollouts
        return cls(
            waits=_takes(inner.dequeue_rollout, "wait"),
            names_claimers=_takes(inner.dequeue_rollout, "worker_id"),
            names_starters=_takes(inner.start_rollout, "worker_id"),
            has_batches=has_batches and _takes(inner.dequeue_many_rollouts, "wait"),
            tells_resources=_stands_for(store, "claim_rollouts", _CLAIMING),
            finishes_at_once=kind.finish_attempt is not LightningStore.finish_attempt,
            claims_next=_stands_for(store, "finish_and_claim", (*_CLAIMING, *_FINISHING)),
            takes_back=kind.return_claims is not LightningStore.return_claims,
            keeps_outputs=_takes(inner.finish_attempt, "output"),
        )


def innermost(store: LightningStore) -> LightningStore:
    """The store behind wrappers of this process."""
    while isinstance(store, LightningStoreThreaded):
        store = store.store
    return store


def _stands_for(store: LightningStore, name: str, parts: tuple[str, ...]) -> bool:
    """Whether an operation does what its parts do: not if a subclass has changed one of them and not the whole."""
    kinds = [type(store)]
    while isinstance(store, LightningStoreThreaded):
        store = store.store
        kinds.append(type(store))
    return _owner(kinds[-1], name) is not LightningStore and all(
        issubclass(_owner(kind, name), _owner(kind, part)) for kind in kinds for part in parts
    )


def _owner(kind: type, name: str) -> type:
    """The class that a method comes from; the contract itself for a store of another making."""
    return next((owner for owner in kind.__mro__ if name in vars(owner)), LightningStore)


def _takes(method: Any, parameter: str) -> bool:
    """Whether a method knows a parameter."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
    return parameter in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
