"""The SQLite store: durable, and shared by every process that opens its file.

All writes go through one writer, reads to connections of their own, and both see what is committed (WAL). Waiters are
woken by notices; those of other processes are found by a watching thread that reads `PRAGMA data_version` every 50 ms,
and only while somebody waits.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigurationError, IncompatibleStore
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.durable import NOTICES_AT_HAND, DurableStore, Job
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS
from agentlightning.store.local import (
    DEFAULT_MAX_ATTEMPT_BYTES,
    DEFAULT_MAX_ATTEMPT_SPANS,
    DEFAULT_MAX_SPAN_BYTES,
    Call,
    Clock,
    execute,
)
from agentlightning.store.notices import DEFAULT_CAPACITY, Listener, NoticeBoard, NoticeFields
from agentlightning.store.operations import operations_of
from agentlightning.store.sqlite.database import (
    MEMORY,
    Durability,
    check_replaceable,
    checkpoint,
    connect,
    migrate,
    prepare,
    store_errors,
)
from agentlightning.store.sqlite.writer import SqliteTransaction, Writer, read_notices
from agentlightning.store.tables import ALL_ROWS
from agentlightning.utils.metrics import MetricsBackend
from agentlightning.utils.private_files import path_errors, replaced_file
from agentlightning.utils.spelling import suggests_arguments

__all__ = ["SqliteLightningStore"]

logger = logging.getLogger(__name__)

READER_THREADS = 4
_WITH_MANY = frozenset(op.name for op in operations_of(LightningStore).values() if op.many is not None)
LARGE = 64
"""An operation on more items than this is left to the writer's thread."""


WATCH_SECONDS = 0.05


class Watcher:
    """A thread that reads `PRAGMA data_version` every 50 ms as long as the board has waiters, and sleeps otherwise."""

    def __init__(self, path: str, board: NoticeBoard) -> None:
        self._path = path
        self._board = board
        self._wanted = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # protects `_thread`
        self.earliest_due: float | None = None
        """When the watchdog must look again, as last seen in the file."""

    def watch(self) -> None:
        """Somebody is about to wait."""
        self._wanted.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="agl-store-watcher", daemon=True)
                    self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        connection = connect(self._path, is_reader=True)
        seen = -1
        try:
            while not self._is_stopped:
                if self._board.has_waiters:
                    seen = self._look(connection, seen)
                    time.sleep(WATCH_SECONDS)
                else:
                    self._wanted.wait()
                    self._wanted.clear()
        finally:
            connection.close()

    def _look(self, connection: sqlite3.Connection, seen: int) -> int:
        """Publish what is new; returns the version it saw."""
        try:
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != seen:
                foreign = read_notices(connection, self._board.cursor)
                (due,) = connection.execute("SELECT min(due) FROM rollouts WHERE due IS NOT NULL").fetchone()
                if foreign:
                    self._board.publish(foreign)
                before, self.earliest_due = self.earliest_due, due
                if due is not None and (before is None or due < before):
                    self._board.wake_everyone()
            return int(version)
        except sqlite3.Error as error:
            logger.warning("Cannot see what other processes write to store '%s': %s", self._path, error)
            return -1


class _Working:
    """The threads and connections of a store that is in use; a forked child leaves its parent's behind."""

    def __init__(self, writer: Writer, watcher: Watcher | None) -> None:
        self.writer = writer
        self.watcher = watcher
        self.readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="agl-store-reader")
        self.idle: deque[sqlite3.Connection] = deque()
        writer.before_end = self._close_readers

    def let_go(self) -> None:
        self.writer.stop_soon()

    def close(self) -> None:
        self.writer.stop()

    def _close_readers(self) -> None:
        """Runs in the writer's thread: the writer lets go of the file last, and SQLite then removes the log."""
        self.readers.shutdown()
        while self.idle:
            self.idle.popleft().close()
        if self.watcher is not None:
            self.watcher.stop()


@suggests_arguments
class SqliteLightningStore(DurableStore[_Working]):
    """A store in a SQLite file."""

    def __init__(
        self,
        path: str | Path = MEMORY,
        *,
        durability: Durability = "process",
        max_span_bytes: int = DEFAULT_MAX_SPAN_BYTES,
        max_attempt_bytes: int = DEFAULT_MAX_ATTEMPT_BYTES,
        max_attempt_spans: int = DEFAULT_MAX_ATTEMPT_SPANS,
        tracker: MetricsBackend | None = None,
        scan_debounce_seconds: float = 0.0,
        lost_worker_seconds: float = LOST_WORKER_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Open a file, or create it.

        Args:
            path: The file; `:memory:` gives a store of this process only.
            durability: With "process", what was acknowledged survives the death of every process; with "power", also
                the loss of power, at the price of waiting for the disk at each commit.
            max_span_bytes: Largest span that is accepted, as JSON.
            max_attempt_bytes: How much the spans of one attempt may take; further ones are refused.
            max_attempt_spans: How many spans one attempt may have; further ones are refused.
            tracker: Measures every operation.
            scan_debounce_seconds: Least time between two looks of the watchdog.
            lost_worker_seconds: How long a worker with heartbeats may be silent until what it claimed is given back.
            clock: Seconds since the epoch; for tests.
        """
        options = {
            "max_span_bytes": max_span_bytes,
            "max_attempt_bytes": max_attempt_bytes,
            "max_attempt_spans": max_attempt_spans,
            "scan_debounce_seconds": scan_debounce_seconds,
            "lost_worker_seconds": lost_worker_seconds,
        }
        kept_notices = DEFAULT_CAPACITY if str(path) == MEMORY else NOTICES_AT_HAND
        super().__init__(str(path), str(path), options, tracker=tracker, clock=clock, kept_notices=kept_notices)
        self._options["durability"] = durability
        self.path = str(path)
        self.durability: Durability = durability
        self._damage: IncompatibleStore | None = None
        if self.path != MEMORY:
            self._board.start_at(prepare(self.path, durability))

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {**super().capabilities, "zero_copy": self.path != MEMORY}

    # ------------------------------------------------------------------ threads

    def _open(self) -> _Working:
        connection = connect(self.path, durability=self.durability)
        if self.path == MEMORY:
            migrate(connection, self.path)
        writer = Writer(
            self.path,
            SqliteTransaction(connection, self._limits),
            self._board,
            waits_for_disk=self.durability == "power",
            clock=self._clock,
            watch=self._watch,
        )
        return _Working(writer, None if self.path == MEMORY else Watcher(self.path, self._board))

    async def close(self) -> None:
        was_working = self._working is not None
        await super().close()
        if not was_working:  # processes that were forked from this one may have written
            await asyncio.get_running_loop().run_in_executor(None, self.checkpoint)

    def checkpoint(self) -> None:
        """Move the log into the file, so that the file alone is the store until the next write.

        Waits for readers and for writers of other processes a tenth of a second at most; while one of them is at work
        the log stays as it is. `close` does this too.
        """
        with store_errors(self.path):
            checkpoint(self.path)

    # ------------------------------------------------------------------ transactions

    def _run_write(self, call: Call) -> "asyncio.Future[Any]":
        if self._damage is not None:  # found by a reader; a writer that has its pages at hand would not notice
            raise IncompatibleStore(str(self._damage))
        if call.name in _WITH_MANY:
            call.is_large = any(len(many) > LARGE for many in (*call.args, *call.kwargs.values()))
        return super()._run_write(call)

    def _submit(self, working: _Working, job: Job) -> None:
        working.writer.submit(job)

    async def _run_read(self, call: Call) -> object:
        if self.path == MEMORY:
            return await self._run_write(call)
        loop = asyncio.get_running_loop()
        working = self._work()
        read = partial(self._read_now, working, call)
        try:
            answer = await loop.run_in_executor(working.readers, partial(read, look=call.watchdog))
            if isinstance(answer, Call):
                await self._write(answer)
                answer = await loop.run_in_executor(working.readers, partial(read, look=False))
        except IncompatibleStore as error:
            self._damage = error
            raise
        return answer

    def _read_now(self, working: _Working, call: Call, *, look: bool) -> object:
        """Run a call on a reading connection; with `look`, answer what the watchdog has to do first, if anything."""
        with store_errors(self.path):
            try:
                connection = working.idle.pop()
            except IndexError:
                connection = connect(self.path, is_reader=True)
            now, tx = self._clock(), SqliteTransaction(connection, self._limits)
            try:
                connection.execute("BEGIN")
                if look:
                    tx.refresh_due()
                    looking = self._watch.look(tx.earliest_due, now)
                    if looking is not None:
                        return looking
                return execute(call, tx, now)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                working.idle.append(connection)

    # ------------------------------------------------------------------ waiting

    async def _sleep(self, listener: Listener, deadline: float) -> bool:
        watcher = self._work().watcher
        if watcher is not None:
            watcher.watch()
        return await super()._sleep(listener, deadline)

    def _next_due(self) -> float | None:
        working = self._work()
        known = (working.writer.earliest_due, working.watcher.earliest_due if working.watcher else None)
        return min((due for due in known if due is not None), default=None)

    async def _notices_after(self, cursor: int) -> Sequence[NoticeFields] | None:
        if self.path == MEMORY and not self._is_closed:
            return self._board.after(cursor)
        return await super()._notices_after(cursor)

    async def _latest_cursor(self) -> int:
        return self._board.cursor if self.path == MEMORY else await super()._latest_cursor()

    def _read_notices(self, cursor: int, most_rows: int = ALL_ROWS) -> list[NoticeFields]:
        with store_errors(self.path):
            connection = connect(self.path, is_reader=True)
            try:
                return read_notices(connection, cursor, most_rows)
            finally:
                connection.close()

    # ------------------------------------------------------------------ backup

    async def backup(self, path: str | Path) -> None:
        """Copy the store as it is now to another file, while it is in use.

        An earlier backup of that name is replaced at the end. Another file is not: `ConfigurationError`.
        """
        if self.path == MEMORY:
            raise ConfigurationError("A ':memory:' store has no file to back up; use export_store, or open a file.")
        await asyncio.get_running_loop().run_in_executor(self._work().readers, self._backup_now, Path(path))

    def _backup_now(self, path: Path) -> None:
        if path.exists() and path.samefile(self.path):
            raise ConfigurationError(f"'{path}' is the store itself; give the backup another path.")
        check_replaceable(path)
        with path_errors(path), replaced_file(path) as part, store_errors(part.name):
            source, target = connect(self.path, is_reader=True), sqlite3.connect(part.name)
            try:
                source.backup(target)
            finally:
                target.close()
                source.close()
