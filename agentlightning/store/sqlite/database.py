"""The database file: opened only if it is ours and whole, brought up to the current schema, never touched otherwise."""

import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from agentlightning.errors import ConfigurationError, IncompatibleStore, StoreUnavailable
from agentlightning.store.tables import migrations
from agentlightning.utils.private_files import create_file

Durability = Literal["process", "power"]

MEMORY = ":memory:"
"""The path of a database that lives in this process only."""

APPLICATION_ID = 0x41474C53  # "AGLS", in the header of every file of ours
_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\x00"
_USER_VERSION_AT, _APPLICATION_ID_AT = 60, 68

CHECKED_BYTES = 32 * 1024 * 1024
"""Files up to this size are checked whole when they are opened; larger ones show damage where it is met."""
BUSY_TIMEOUT_SECONDS = 30.0
_FOLDER_MODE = 0o700
"""Of a folder that is made for a store: for its owner alone."""
READERS_SECONDS = 0.1
"""How long a checkpoint waits for readers before it leaves the log as it is; writers wait meanwhile."""
PAGE_BYTES = 8192
"""Spans take a kilobyte or two; twice the usual page halves what a commit of a few of them writes."""
WRITER_CACHE_KIB = 32 * 1024
READER_CACHE_KIB = 4 * 1024
SYNCHRONOUS: dict[str, str] = {"process": "NORMAL", "power": "FULL"}


@contextmanager
def store_errors(path: str) -> Iterator[None]:
    """Say SQLite's errors in ours: what happened to which file, and the way out."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(error, path) from error


def _translated(error: sqlite3.Error, path: str) -> StoreUnavailable:
    text = str(error)
    if "full" in text:
        return StoreUnavailable(
            f"The disk of store '{path}' is full; what was acknowledged is kept. Free space, then retry."
        )
    if "locked" in text or "busy" in text:
        return StoreUnavailable(
            f"Store '{path}' was locked by another process for {BUSY_TIMEOUT_SECONDS:.0f} s; retry."
        )
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return IncompatibleStore(f"Store '{path}' is damaged ({text}); restore it from a backup.")
    return StoreUnavailable(f"Store '{path}' cannot be used: {text}.")


def connect(path: str, *, durability: Durability = "process", is_reader: bool = False) -> sqlite3.Connection:
    """A connection that leaves transactions to the caller."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # counts for a new file only
        connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS[durability]}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # a commit in an event loop must not wait for the disk
        connection.execute("PRAGMA journal_size_limit = 0")  # a log that begins anew is cut, so that its length counts
        connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB if is_reader else WRITER_CACHE_KIB}")
        if is_reader:
            connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def set_patience(connection: sqlite3.Connection, patient: bool) -> None:
    """Wait for another process that holds the file, or be told at once."""
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_SECONDS * 1000) if patient else 0}")


def log_length(path: str) -> int:
    """Bytes of the write-ahead log beside a file."""
    try:
        return os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        return 0


def checkpoint(path: str, *, empties: bool = True) -> None:
    """Move the log into the file as far as readers let it; `empties` also cuts it to nothing if they do altogether."""
    if log_length(path) == 0:
        return
    connection = connect(path)
    try:
        connection.execute(f"PRAGMA busy_timeout = {int(READERS_SECONDS * 1000)}")
        connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if empties else 'PASSIVE'})").fetchone()
    finally:
        connection.close()


def prepare(path: str, durability: Durability) -> int:
    """Check a file, create or migrate its schema, and return the number of its newest notice."""
    if durability not in SYNCHRONOUS:
        raise ConfigurationError(f"durability is {durability!r}; use 'process' or 'power'.")
    _check_header(path)
    _create_if_missing(path)
    with store_errors(path):
        connection = connect(path, durability=durability)
        try:
            if 0 < Path(path).stat().st_size <= CHECKED_BYTES:
                found = "; ".join(row[0] for row in connection.execute("PRAGMA quick_check(3)")).replace("\n", "; ")
                if found != "ok":
                    raise IncompatibleStore(f"Store '{path}' is damaged ({found}); restore it from a backup.")
            _check_ours(connection, path)
            _use_write_ahead_log(connection)
            migrate(connection, path)
            newest: int = connection.execute("SELECT coalesce(max(last_cursor), 0) FROM notices").fetchone()[0]
            return newest
        finally:
            connection.close()


def _read_header(path: Path) -> bytes:
    """The first bytes as a plain file, which cannot change anything; none of a file that is missing or empty."""
    if not path.exists():
        return b""
    with path.open("rb") as stream:
        return stream.read(_HEADER_BYTES)


def _check_header(path: str) -> None:
    file = Path(path)
    try:
        file.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"Folder '{file.parent}' for store '{path}' cannot be made: {error.strerror}; give another path."
        ) from error
    if file.is_dir():
        raise IncompatibleStore(f"'{path}' is a folder, not a store; give the path of a store file.")
    header = _read_header(file)
    if not header:
        return
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise IncompatibleStore(f"'{path}' is not a store (not a SQLite file); give another path or restore a backup.")
    (application_id,) = struct.unpack_from(">i", header, _APPLICATION_ID_AT)
    (version,) = struct.unpack_from(">i", header, _USER_VERSION_AT)
    if application_id not in (0, APPLICATION_ID):
        raise _foreign(path)
    if application_id == APPLICATION_ID and version > len(migrations()):
        raise _newer(path, version)


def _create_if_missing(path: str) -> None:
    """Create the file for its owner alone; SQLite gives the log and its index the same mode."""
    if os.path.islink(path) and hasattr(os, "geteuid") and os.lstat(path).st_uid not in (0, os.geteuid()):
        raise ConfigurationError(f"'{path}' is a link that another account has made; give the path of the file itself.")
    try:
        os.close(create_file(os.path.realpath(path)))
    except FileExistsError:
        return
    except OSError as error:
        raise StoreUnavailable(f"Store '{path}' cannot be created: {error.strerror}.") from error


def check_replaceable(path: Path) -> None:
    """Refuse to have a file replaced by a backup, unless it is a store that nobody uses, or empty."""
    if path.exists() and not path.is_file():
        raise ConfigurationError(f"'{path}' is not a file; give the backup a path of its own.")
    header = _read_header(path)
    if not header:
        return
    is_ours = len(header) == _HEADER_BYTES and struct.unpack_from(">i", header, _APPLICATION_ID_AT)[0] == APPLICATION_ID
    if not (is_ours and header.startswith(_MAGIC)):
        raise ConfigurationError(
            f"'{path}' exists and is not a store; a backup replaces an earlier backup only. Give another path."
        )
    if Path(f"{path}-wal").exists():
        raise ConfigurationError(
            f"'{path}' is a store in use, or one that was not closed; give the backup another path."
        )


def _foreign(path: str) -> IncompatibleStore:
    return IncompatibleStore(f"'{path}' is a SQLite file of another program; give the store a path of its own.")


def _newer(path: str, version: int) -> IncompatibleStore:
    return IncompatibleStore(
        f"Store '{path}' has schema version {version}, this release knows {len(migrations())}: "
        "open it with the release that wrote it, or a later one. The file was not changed."
    )


def _check_ours(connection: sqlite3.Connection, path: str) -> None:
    """A file with tables must bear our mark; one without may be in the making by another process."""
    # In this order: the mark is made together with the first tables, perhaps between these two lines.
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if tables and application_id != APPLICATION_ID:
        raise _foreign(path)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Readers then never wait for the writer. Two processes that switch a new file at once: one tries again."""
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Apply the migrations that a file lacks, all or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        _check_ours(connection, path)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        known = migrations()
        if version > len(known):
            raise _newer(path, version)
        for number in range(version + 1, len(known) + 1):
            for statement in _statements(known[number - 1]):
                connection.execute(statement)
            connection.execute("INSERT INTO schema_version VALUES (?, ?)", (number, time.time()))
        if version < len(known):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {len(known)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
