"""MEMORY — the one place where state lives: tasks and resources go down, spans and rewards come up."""

import importlib
from typing import TYPE_CHECKING

from agentlightning.store.archive import export_store, import_store
from agentlightning.store.base import (
    UNSET,
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Unset,
)
from agentlightning.store.forwarding import BlockingStore, LightningStoreThreaded
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore, SqliteLightningStore

if TYPE_CHECKING:  # a web server and a web client, which most programs need neither of, load on first touch
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.store.http.server import LightningStoreServer

__all__ = [
    "UNSET",
    "Unset",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "LightningStoreClient",
    "LightningStoreServer",
    "InMemoryLightningStore",
    "SqliteLightningStore",
    "SQLiteLightningStore",
    "BlockingStore",
    "export_store",
    "import_store",
]


_LATE = {
    "LightningStoreClient": "agentlightning.store.http.client",
    "LightningStoreServer": "agentlightning.store.http.server",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module 'agentlightning.store' has no attribute '{name}'")
    value: object = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value
