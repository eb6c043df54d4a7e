"""MEMORY — the one place where state lives: tasks and resources go down, spans and rewards come up."""

from agentlightning.store.base import (
    UNSET,
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Unset,
)
from agentlightning.store.memory import InMemoryLightningStore

__all__ = [
    "UNSET",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreStatistics",
    "Unset",
]
