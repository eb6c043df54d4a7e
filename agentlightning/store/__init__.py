"""MEMORY — the one place where state lives: tasks and resources go down, spans and rewards come up."""

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

__all__ = [
    "UNSET",
    "Unset",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "InMemoryLightningStore",
    "SqliteLightningStore",
    "SQLiteLightningStore",
    "BlockingStore",
    "export_store",
    "import_store",
]
