"""The writer: one thread that takes all waiting operations, runs them in one transaction, commits once, answers all.

Group commit makes durable writes cheap: sixteen workers that each append a span share one commit. Nothing is answered
before it is committed. An operation that raises takes only itself down; a commit that fails takes its whole batch down,
and every caller of the batch is told.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from agentlightning.errors import StoreUnavailable
from agentlightning.store.local import WATCHDOG, Call, Clock, execute
from agentlightning.store.notices import DEFAULT_CAPACITY, NoticeBoard, NoticeFields
from agentlightning.store.sqlite.database import store_errors
from agentlightning.store.sqlite.transaction import SqliteTransaction

__all__ = ["Job", "Writer", "read_notices"]

LARGEST_BATCH = 512
COMMITS_BETWEEN_PRUNES = 1000


@dataclass(slots=True)
class Job:
    """A call and who waits for its result."""

    call: Call
    future: "asyncio.Future[Any] | None" = None
    """None if nobody does."""
    result: Any = None
    error: BaseException | None = None


class _Spoiled(Exception):
    """A failed operation had rows in the database already; the batch must be run again without it."""


def read_notices(connection: sqlite3.Connection, after: int) -> list[NoticeFields]:
    """Committed notices behind a cursor."""
    rows = connection.execute("SELECT body FROM notices WHERE last_cursor > ? ORDER BY last_cursor", (after,))
    notices = [tuple(fields) for (body,) in rows for fields in orjson.loads(body)]
    return [fields for fields in notices if fields[1] > after]


class Writer:
    """The thread that owns the writing connection."""

    def __init__(
        self,
        path: str,
        open_transaction: Callable[[], SqliteTransaction],
        board: NoticeBoard,
        *,
        clock: Clock,
        is_scan_due: Callable[[float | None, float], bool],
        on_abandoned: Callable[[Job], None],
    ) -> None:
        self._path = path
        self._open_transaction = open_transaction
        self._board = board
        self._clock = clock
        self._is_scan_due = is_scan_due
        self._on_abandoned = on_abandoned
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._data_version = -1
        self._commits = 0
        self._thread = threading.Thread(target=self._run, name="agl-store-writer", daemon=True)
        self.earliest_due: float | None = None
        """When the watchdog must look again, as of the last commit."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Finish what was submitted, then close the connection."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with store_errors(self._path):
                self._tx = self._open_transaction()
        except Exception as error:  # noqa: BLE001 # whoever waits must be told
            self._refuse_all(error)
            return
        self._connection = self._tx.session.connection
        while (job := self._jobs.get()) is not None:
            batch = [job]
            while batch:
                batch = self._run_batch(batch)
        self._connection.close()

    def _refuse_all(self, error: Exception) -> None:
        while (job := self._jobs.get()) is not None:
            job.error = error
            _settle([job], self._on_abandoned)

    def _run_batch(self, jobs: list[Job]) -> list[Job]:
        """Run jobs, and those that arrive meanwhile, in one transaction; returns the jobs to run again."""
        try:
            with store_errors(self._path):
                self._begin()
                self._run_jobs(jobs)
                notices = self._commit()
        except _Spoiled:
            self._roll_back()
            settled = [job for job in jobs if job.error is not None]
            _settle(settled, self._on_abandoned)
            return [job for job in jobs if job.error is None]
        except Exception as error:  # noqa: BLE001 # every caller of the batch must be told
            self._roll_back()
            for job in jobs:
                job.error = job.error or error
            _settle(jobs, self._on_abandoned)
            return []
        self._publish(notices)
        _settle(jobs, self._on_abandoned)
        return []

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self._data_version = version
            self._tx.forget()
            self._catch_up()
            self._tx.refresh_due()

    def _catch_up(self) -> None:
        """Tell this process what others have committed."""
        foreign = read_notices(self._connection, self._board.cursor)
        if foreign:
            self._board.publish(foreign)
        self._tx.cursor = self._board.cursor

    def _run_jobs(self, jobs: list[Job]) -> None:
        """Run the given jobs and append those that were waiting by then."""
        index = 0
        while index < len(jobs):
            self._run_job(jobs[index])
            index += 1
            if index == len(jobs):
                self._take_waiting(jobs)

    def _take_waiting(self, jobs: list[Job]) -> None:
        while len(jobs) < LARGEST_BATCH:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._jobs.put(None)
                return
            jobs.append(job)

    def _run_job(self, job: Job) -> None:
        if job.future is not None and job.future.cancelled():
            return
        now = self._clock()
        if job.call.watchdog and self._is_scan_due(self._tx.earliest_due, now):
            execute(WATCHDOG, self._tx, now)
            self._tx.session.keep()
            self._tx.refresh_due()
        try:
            job.result = execute(job.call, self._tx, now)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 # goes to the caller
            job.error = error
            if self._tx.session.is_spoiled:
                raise _Spoiled from error
            self._tx.session.take_back()
        self._tx.session.keep()

    def _commit(self) -> list[NoticeFields]:
        session = self._tx.session
        session.flush()
        notices = self._tx.notices
        if notices:
            session.write("INSERT INTO notices VALUES (?, ?)", [(notices[-1][1], orjson.dumps(notices))])
        self._commits += 1
        if self._commits % COMMITS_BETWEEN_PRUNES == 0:
            session.write("DELETE FROM notices WHERE last_cursor < ?", [(self._tx.cursor - DEFAULT_CAPACITY,)])
        self._connection.execute("COMMIT")
        return self._tx.end_batch()

    def _roll_back(self) -> None:
        """Forget the batch; the next one reads everything afresh."""
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        self._tx.forget()
        self._data_version = -1

    def _publish(self, notices: list[NoticeFields]) -> None:
        before, self.earliest_due = self.earliest_due, self._tx.earliest_due
        if notices:
            self._board.publish(notices)
        due = self.earliest_due
        if due is not None and (before is None or due < before):
            self._board.wake_everyone()


def _settle(jobs: list[Job], on_abandoned: Callable[[Job], None]) -> None:
    """Hand results to the loops that wait for them, once a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if job.future is not None:
            by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, of_loop in by_loop.items():
        try:
            loop.call_soon_threadsafe(_answer, of_loop, on_abandoned)
        except RuntimeError:  # the loop is closed
            for job in of_loop:
                on_abandoned(job)


def _answer(jobs: list[Job], on_abandoned: Callable[[Job], None]) -> None:
    for job in jobs:
        future = job.future
        if future is None or future.done():
            on_abandoned(job)
        elif job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.result)


def closed_store(path: str) -> StoreUnavailable:
    return StoreUnavailable(f"Store '{path}' is closed; open it again with SqliteLightningStore('{path}').")
