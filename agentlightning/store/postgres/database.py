"""The database: where it is, connections to it, its schema, and its errors in our words.

A connection string may hold a password, so nothing here puts one into a message: a database is named by `described`.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import conninfo
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from agentlightning.errors import ConfigurationError, IncompatibleStore, InvalidValue, StoreUnavailable
from agentlightning.store.postgres.session import Connection
from agentlightning.store.tables import migrations

Pool = ConnectionPool[Connection]

RETRIED: Final = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.UniqueViolation,  # another transaction has put the same rollout first: it is found now
)
"""Errors after which a transaction, of which nothing remains, is run again."""

LOCK_SECONDS: Final = 30
"""How long a statement waits for a lock that another session holds."""
OUTAGE_SECONDS: Final = 30.0
"""How long an operation waits for a database that is being restarted."""
OLDEST_SERVER: Final = 140_000  # the first release with lz4
NOW: Final = "extract(epoch FROM clock_timestamp())::float8"
_MIGRATION_LOCK: Final = 0x41474C4D  # "AGLM"
_OPTIONS: Final = " ".join(
    f"-c {name}={value}"
    for name, value in {
        # One plan for each statement, made when the tables may be empty: it must be the one that fits full tables.
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
        "lock_timeout": f"{LOCK_SECONDS}s",
        "idle_in_transaction_session_timeout": "60s",  # a server that was stopped lets go of its locks
    }.items()
)


def parsed(dsn: str) -> dict[str, Any]:
    """The parts of a connection string; refused without quoting it, for it may hold a password."""
    try:
        parts = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        parts = {"host": "@"}
    if "@" in str(parts.get("host", "")) or not str(parts.get("port", 0)).isdecimal():
        raise ConfigurationError(
            "The address of the PostgreSQL database cannot be read; write it as postgresql://user@host:5432/database, "
            "with @, / and : in a password as %40, %2F and %3A."
        ) from None
    return parts


def described(dsn: str) -> str:
    """The database without its password, as everybody may read it."""
    parts = parsed(dsn)
    host = str(parts.get("host") or parts.get("hostaddr") or "")
    user = f"{parts['user']}@" if "user" in parts else ""
    port = f":{parts['port']}" if "port" in parts else ""
    if host.startswith("/"):
        return f"postgresql://{user}/{parts.get('dbname', '')}?host={host}"
    return f"postgresql://{user}{host}{port}/{parts.get('dbname', '')}"


@contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Translate the errors of the database into ours: what happened to which store, and the way out."""
    try:
        yield
    except psycopg.DataError as error:
        raise InvalidValue(f"PostgreSQL cannot keep a value of this operation: {_first_line(error)}.") from error
    except (PoolTimeout, PoolClosed, psycopg.Error) as error:
        raise StoreUnavailable(f"Store '{name}' cannot be used: {_first_line(error)}; check it, or retry.") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def connect(dsn: str) -> Connection:
    """A connection that leaves transactions to the caller."""
    return Connection.connect(dsn, **_arguments(dsn))


def open_pool(dsn: str, size: int) -> Pool:
    """Connections that are made when they are needed, and made anew when the database was restarted."""
    return ConnectionPool(
        dsn,
        min_size=1,
        max_size=size,
        timeout=OUTAGE_SECONDS,
        reconnect_timeout=OUTAGE_SECONDS,
        open=True,
        connection_class=Connection,
        name="agl-store",
        kwargs=_arguments(dsn),
    )


def _arguments(dsn: str) -> dict[str, Any]:
    given = str(parsed(dsn).get("options", ""))
    return {
        "autocommit": True,
        "prepare_threshold": None,
        "options": f"{given} {_OPTIONS}".strip(),
        "connect_timeout": 10,
        # A database whose machine has vanished is noticed within half a minute.
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }


# ---------------------------------------------------------------------- schema


class DatabaseClock:
    """The database's clock, as it was last seen from here."""

    def __init__(self, now: float) -> None:
        self.set(now)

    def __call__(self) -> float:
        return time.time() + self._ahead_seconds

    def set(self, now: float) -> None:
        """What the database's clock shows in this moment."""
        self._ahead_seconds = now - time.time()


def prepare(dsn: str) -> tuple[int, DatabaseClock]:
    """Create or migrate the schema, and return the number of the newest notice and the database's clock.

    A database that is not ours, too old or too new is refused.
    """
    name = described(dsn)
    with store_errors(name), connect(dsn) as connection:
        if connection.info.server_version < OLDEST_SERVER:
            raise IncompatibleStore(
                f"The server of '{name}' is PostgreSQL {connection.info.server_version // 10_000}; use 14 or later."
            )
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = 0")  # another server may migrate for long
            connection.execute(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
            _migrate(connection, name)
        row = connection.execute(f"SELECT coalesce(max(last_cursor), 0), {NOW} FROM notices").fetchone()
        assert row is not None  # an aggregate has one row
        return row[0], DatabaseClock(row[1])


def _migrate(connection: Connection, name: str) -> None:
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    found = {table for (table,) in connection.execute(tables).fetchall()}
    version = 0
    if "schema_version" in found:
        row = connection.execute("SELECT max(version) FROM schema_version").fetchone()
        version = (row and row[0]) or 0
    elif found & {"rollouts", "spans", "queue", "runs"}:
        raise IncompatibleStore(f"'{name}' holds tables of another program; give the store a database of its own.")
    known = migrations()
    if version > len(known):
        raise IncompatibleStore(
            f"Store '{name}' has schema version {version}, this release knows {len(known)}: use the release that wrote "
            "it, or a later one. The database was not changed."
        )
    for number in range(version + 1, len(known) + 1):
        connection.execute(_translated(known[number - 1]), prepare=False)
        connection.execute("INSERT INTO schema_version VALUES (%s, %s)", (number, time.time()))


_TYPES: Final = (
    (r"^.*-- sqlite$", ""),
    (r"^-- postgres: ", ""),
    (r"\bINTEGER PRIMARY KEY\b", "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    (r"\bBLOB\b", "BYTEA"),
    (r"\bTEXT\b", 'TEXT COLLATE "C"'),  # sorted as Python sorts
    (r"\bWITHOUT ROWID\b", ""),
)


def _translated(script: str) -> str:
    """A migration in PostgreSQL's dialect."""
    for pattern, replacement in _TYPES:
        script = re.sub(pattern, replacement, script, flags=re.MULTILINE)
    return script
