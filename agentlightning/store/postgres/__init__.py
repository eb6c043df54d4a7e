"""The store in a PostgreSQL database, shared by any number of servers and programs; needs the extra `postgres`."""

from agentlightning.store.postgres.store import PostgresLightningStore

__all__ = ["PostgresLightningStore"]
