"""How the server performs operations such that a request which comes twice acts once: the store keeps the answers."""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from agentlightning.store.base import LightningStore
from agentlightning.store.foreign import ForeignStore
from agentlightning.store.forwarding import LightningStoreThreaded
from agentlightning.store.local import LocalStore

__all__ = ["Perform", "remembering"]


class Perform(Protocol):
    """`LightningStore.perform`, or something like it."""

    def __call__(
        self, name: str, arguments: Mapping[str, Any], *, request_id: str | None = None, caller: str = ""
    ) -> Awaitable[Any]: ...


def remembering(store: LightningStore) -> Perform:
    """How to perform operations on a store such that a repeated request acts once."""
    inner = store.store if isinstance(store, LightningStoreThreaded) else store
    for kind in (LocalStore, ForeignStore):
        if isinstance(inner, kind) and type(inner).perform is kind.perform:
            return inner.perform

    def perform(
        name: str, arguments: Mapping[str, Any], *, request_id: str | None = None, caller: str = ""
    ) -> Awaitable[Any]:
        """Another `perform`, as `LightningStore` declares it, knows no caller."""
        return inner.perform(name, arguments, request_id=request_id)

    return perform
