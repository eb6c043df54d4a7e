"""The store in a PostgreSQL database, shared by any number of servers and programs; needs the extra `postgres`."""

from agentlightning.utils.installation import install_command

try:
    import psycopg_pool  # noqa: F401 # the error of the imports below would not name the extra
except ImportError as error:
    raise ImportError(
        f"A store in PostgreSQL needs psycopg and its pool: run `{install_command('postgres')}`."
    ) from error

from agentlightning.store.postgres.store import PostgresLightningStore

__all__ = ["PostgresLightningStore"]
