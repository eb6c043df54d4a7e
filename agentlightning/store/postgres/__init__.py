"""The store in a PostgreSQL database, shared by any number of servers and programs; needs the extra `postgres`."""

try:
    import psycopg_pool  # noqa: F401 # the error of the imports below would not name the extra
except ImportError as error:
    raise ImportError(
        "A store in PostgreSQL needs psycopg and its pool; install them with `pip install 'agentlightning[postgres]'`."
    ) from error

from agentlightning.store.postgres.store import PostgresLightningStore

__all__ = ["PostgresLightningStore"]
