"""The durable store in a SQLite file."""

from agentlightning.store.sqlite.store import SqliteLightningStore

__all__ = ["SQLiteLightningStore", "SqliteLightningStore"]

SQLiteLightningStore = SqliteLightningStore
