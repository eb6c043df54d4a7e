"""The writer: takes all waiting operations, runs them in one transaction, commits once, answers all.

Group commit makes durable writes cheap: sixteen workers that each append a span share one commit. Nothing is answered
before it is committed. An operation that raises takes only itself down; a commit that fails takes its whole batch down,
and every caller of the batch is told.

There is one writing connection and one *turn*; whoever has the turn runs everyone's operations. A short batch is run
where it was submitted, at the end of the event loop's current round: handing it to a thread and back would cost as
much as the batch itself. The writer's own thread takes over whatever may have to wait: commits that wait for the disk
(`durability="power"`), large operations, another process that holds the file, and checkpoints.

A transaction remembers what it has read, which holds as long as no other connection has written, and holds rows back
until the batch ends; an operation that raises never reaches them. A reading transaction is the same object on a
connection of its own, used once.
"""

import asyncio
import atexit
import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import ClassVar

import orjson

from agentlightning.store.durable import Job, closed_store, settle
from agentlightning.store.local import Clock, Watchdog, execute
from agentlightning.store.notices import DEFAULT_CAPACITY, NoticeBoard, NoticeFields
from agentlightning.store.sql import SqlTransaction
from agentlightning.store.sqlite.database import MEMORY, checkpoint, log_length, set_patience, store_errors
from agentlightning.store.tables import (
    ALL_ROWS,
    ATTEMPT_COLUMNS,
    RECORD_TABLES,
    ROLLOUT_COLUMNS,
    SELECT_NOTICES,
    Row,
    SqlEntry,
    notices_of,
)
from agentlightning.store.transaction import Entry, StoreLimits
from agentlightning.types import Attempt

logger = logging.getLogger(__name__)

READ_AHEAD = 256
"""How many entries of the queue are read at once."""
_READ_QUEUE = (
    "SELECT rollout_id, position FROM queue JOIN rollouts ON number = rollout WHERE position > ? "
    f"ORDER BY position LIMIT {READ_AHEAD}"
)
_INSERT_ROLLOUT = f"INSERT INTO rollouts (number, {ROLLOUT_COLUMNS}, due) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE_ROLLOUT = (
    "UPDATE rollouts SET status = ?, mode = ?, resources_id = ?, end_time = ?, config = ?, metadata = ?, output = ?, "
    "due = ? WHERE number = ?"
)
_WRITES = {
    "inputs": "INSERT OR REPLACE INTO inputs VALUES (?, ?)",
    "rollout_index": "INSERT OR REPLACE INTO rollout_index VALUES (?, ?, ?, ?, ?, ?, ?)",
    "open_spans": "INSERT OR REPLACE INTO open_spans VALUES (?, ?)",
    "sequences": "INSERT OR REPLACE INTO sequences VALUES (?, ?)",
    "metrics": "INSERT INTO metrics (run_id, step, time, body) VALUES (?, ?, ?, ?)",
    **{table.name: table.upsert for table in RECORD_TABLES.values()},
}
_INSERT_SPAN = "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_PUT_ATTEMPT = f"INSERT OR REPLACE INTO attempts ({ATTEMPT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class SqliteTransaction(SqlTransaction):
    """Reads and writes on one connection."""

    orders: ClassVar = {"asc": "ASC", "desc": "DESC"}
    terms: ClassVar = {
        "input": "instr(body, ?) > 0",
        "contains": "instr({}, ?) > 0",
        "exact": "{} IS ?",
        "min": "{} >= ?",
        "max": "{} <= ?",
    }
    span_counts = (
        "coalesce((SELECT max(number) FROM spans), 0), "
        "coalesce((SELECT bytes_so_far FROM spans ORDER BY number DESC LIMIT 1), 0)"
    )

    def __init__(self, connection: sqlite3.Connection, limits: StoreLimits) -> None:
        self.connection = connection
        super().__init__(limits)

    def _remember_nothing(self) -> None:
        super()._remember_nothing()
        self._is_queue_whole = False
        self._tail: int | None = None
        self._next_number: int | None = None
        self._last_span: tuple[int, int] | None = None  # its number, and the bytes of all spans

    def refresh_due(self) -> None:
        """Read the earliest moment of the schedule."""
        self.earliest_due = self.select_rows("SELECT min(due) FROM rollouts WHERE due IS NOT NULL")[0][0]

    # ------------------------------------------------------------------ statements

    def select_stored(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        return self.connection.execute(sql, parameters).fetchall()

    def write(self, sql: str, rows: Iterable[Row]) -> None:
        """Run a statement for every row."""
        self.connection.executemany(sql, rows)

    def _write_held(self) -> None:
        held = self._held
        if "new rollouts" in held:
            self.write(_INSERT_ROLLOUT, [entry.new_row for entry in held["new rollouts"].values()])
        if "changed rollouts" in held:
            self.write(_UPDATE_ROLLOUT, [entry.changed_row for entry in held["changed rollouts"].values()])
        if self._spans:
            self._write_spans()
        if "attempts" in held:
            newest, _ = self._newest_span()  # which their heartbeats cover
            self.write(_PUT_ATTEMPT, [(*row, newest) for row in held["attempts"].values()])
        if "queue" in held:
            places = held["queue"].items()
            self.write("DELETE FROM queue WHERE position = ?", [(place,) for place, number in places if number is None])
            taken = [(place, number) for place, number in places if number is not None]
            self.write("INSERT OR REPLACE INTO queue VALUES (?, ?)", taken)
        for table, rows in held.items():
            if table in _WRITES:
                self.write(_WRITES[table], rows.values())

    def _write_spans(self) -> None:
        number, total = self._newest_span()
        rows = []
        for *described, body in self._spans:
            number += 1
            total += len(body)
            rows.append((number, *described, total, body))
        self.write(_INSERT_SPAN, rows)
        self._last_span = number, total

    def _newest_span(self) -> tuple[int, int]:
        """Number of the last span, and the bytes of all spans."""
        if self._last_span is None:
            rows = self.select_stored("SELECT number, bytes_so_far FROM spans ORDER BY number DESC LIMIT 1")
            self._last_span = rows[0] if rows else (0, 0)
        return self._last_span

    def _id(self, text: str) -> str:
        return text if text.isascii() else text.encode(errors="replace").decode()

    def _within(self, column: str, values: Collection[object], parameters: list[object]) -> str:
        if len(values) == 1:
            parameters.extend(self._id(value) if isinstance(value, str) else value for value in values)
            return f"{column} = ?"
        parameters.append(orjson.dumps([self._id(value) if isinstance(value, str) else value for value in values]))
        return f"{column} IN (SELECT value FROM json_each(?))"

    # ------------------------------------------------------------------ numbers, spans, queue

    def _take_number(self) -> int:
        if self._next_number is None:
            self._next_number = (self.select_rows("SELECT max(number) FROM rollouts")[0][0] or 0) + 1
        self._next_number += 1
        return self._next_number - 1

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        entry = self.known(attempt.rollout_id)
        known = entry.span_ids.get(attempt.sequence_id)
        if known is None:
            sql = "SELECT span_id, length(body) FROM spans WHERE rollout = ? AND attempt = ?"
            rows = self.select_rows(sql, (entry.number, attempt.sequence_id))
            known = entry.span_ids[attempt.sequence_id] = {found for found, _ in rows}
            entry.usage[attempt.sequence_id] = len(rows), sum([size for _, size in rows])
        return span_id in known

    def _load_usage(self, entry: SqlEntry, attempt: Attempt) -> None:
        if attempt.sequence_id not in entry.span_ids:
            self.has_span(attempt, "")

    def _enter_queue(self, entry: Entry) -> None:
        if self._tail is None:
            self._tail = self.select_rows("SELECT coalesce(max(position), 0) FROM queue")[0][0]
        self._tail += 1
        entry.position = self._tail
        self._hold("queue", self._tail, entry.number)
        if self._is_queue_whole:
            self._queue[entry.rollout.rollout_id] = self._tail

    def _leave_queue(self, entry: Entry) -> None:
        self._hold("queue", entry.position, None)
        super()._leave_queue(entry)

    def _head(self, limit: int) -> list[str]:
        head = super()._head(limit)
        while len(head) < limit and not self._is_queue_whole:
            last = self._queue[next(reversed(self._queue))] if self._queue else -1
            following = self.select_rows(_READ_QUEUE, (last,))
            self._queue.update(following)
            self._is_queue_whole = len(following) < READ_AHEAD
            head = super()._head(limit)
        return head


LARGEST_BATCH = 512
LARGEST_BATCH_IN_LOOP = 64
"""More than this would keep an event loop from its other work for milliseconds."""
COMMITS_BETWEEN_PRUNES = 1000
CHECKPOINT_BYTES = 8 * 1024 * 1024
"""The log is moved into the file when it has grown by this much."""
LONGEST_LOG_BYTES = 12 * 1024 * 1024
"""When it has grown by this much, event loops leave their batches to the writer's thread, behind the checkpoint."""
_PRUNE_OPEN_SPANS = (
    "DELETE FROM open_spans WHERE rollout NOT IN (SELECT number FROM rollouts WHERE status IN ('preparing', 'running'))"
)
EXIT_SECONDS = 10.0
"""How long a program that ends waits for the last commits and the last checkpoint."""


class _Busy(Exception):
    """Another process holds the file."""


def read_notices(connection: sqlite3.Connection, after: int, most_rows: int = ALL_ROWS) -> list[NoticeFields]:
    """Committed notices behind a cursor."""
    return notices_of(connection.execute(SELECT_NOTICES, (after, most_rows)), after)


class Writer:
    """The one way into the file."""

    def __init__(
        self,
        path: str,
        tx: SqliteTransaction,
        board: NoticeBoard,
        *,
        waits_for_disk: bool,
        clock: Clock,
        watch: Watchdog,
    ) -> None:
        self._path = path
        self._board = board
        self._waits_for_disk = waits_for_disk
        self._clock = clock
        self._watch = watch
        self._tx = tx
        self._connection = tx.connection
        self._turn = threading.Lock()  # protects the connection, the transaction, and the fields below up to `_jobs`
        self._data_version = -1
        self._is_patient = True
        self._is_stopped = False
        self._commits = 0
        self._log_base = 0  # length of the log after the last checkpoint: 0 unless a reader kept it from being emptied
        self._is_checkpointing = False
        self._is_log_long = False
        self._jobs: deque[Job] = deque()
        self._rounds: set[asyncio.AbstractEventLoop] = set()  # loops that will run a batch at the end of their round
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_errands, name="agl-store-writer", daemon=True)
        self.earliest_due: float | None = None
        """When the watchdog must look again, as of the last commit."""
        self.before_end: Callable[[], None] = lambda: None
        """Called in the writer's thread when all is done, before the file is let go of."""
        self._thread.start()
        atexit.register(self._stop_at_exit)

    def submit(self, job: Job) -> None:
        """Have a job run; from the thread of the loop that waits for it, or from any if none does."""
        self._jobs.append(job)
        if self._is_stopped:
            self._refuse_waiting()
        elif job.future is None or job.call.is_large or self._waits_for_disk:
            self._errands.put(self._run_patiently)
        elif (loop := job.future.get_loop()) not in self._rounds:
            self._rounds.add(loop)
            loop.call_soon(self._end_round, loop)

    def _refuse_waiting(self) -> None:
        """The writer has stopped; whoever still came is told."""
        while self._jobs:
            job = self._jobs.popleft()
            job.error = closed_store(self._path)
            settle([job])

    def stop_soon(self) -> None:
        """Have what was submitted finished and the connection closed, without waiting; takes no lock."""
        self._errands.put(self._run_patiently)
        self._errands.put(None)

    def stop(self) -> None:
        """Finish what was submitted, then close the connection."""
        self.stop_soon()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _stop_at_exit(self) -> None:
        """The program ends, and nobody has closed the store."""
        self.stop_soon()
        self._thread.join(EXIT_SECONDS)

    # ------------------------------------------------------------------ whose turn

    def _run_errands(self) -> None:
        """The writer's thread."""
        while (errand := self._errands.get()) is not None:
            errand()
        self.before_end()
        with self._turn:
            self._move_log()
            self._connection.close()
            self._is_stopped = True
            self._refuse_waiting()
        atexit.unregister(self._stop_at_exit)

    def _run_patiently(self) -> None:
        """Run all that waits; looked at again after each turn, for a loop may just have found it taken."""
        while self._jobs:
            with self._turn:
                self._run_batch(LARGEST_BATCH, None)

    def _end_round(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run what was submitted in this round of a loop, unless somebody else has the turn and will."""
        self._rounds.discard(loop)
        if self._is_log_long:
            self._errands.put(self._run_patiently)
            return
        if not self._turn.acquire(blocking=False):
            return
        try:
            with suppress(_Busy):
                self._run_batch(LARGEST_BATCH_IN_LOOP, loop)
        finally:
            self._turn.release()
        if self._jobs:
            # Too many for a loop, or the file is busy, or another loop found the turn taken just before its release.
            # Never left to this loop, which may be closed before its next round.
            self._errands.put(self._run_patiently)

    # ------------------------------------------------------------------ a batch

    def _run_batch(self, most: int, loop: asyncio.AbstractEventLoop | None) -> None:
        """Run waiting jobs in one transaction; a loop that runs them itself does not wait for other processes."""
        jobs: list[Job] = []
        if not self._jobs:
            return
        try:
            with store_errors(self._path):
                self._begin(patient=loop is None)
                self._run_jobs(jobs, most)
                notices = self._commit()
        except _Busy:
            raise
        except Exception as error:  # noqa: BLE001 # every caller of the batch must be told
            self._roll_back()
            jobs = jobs or [self._jobs.popleft()]
            for job in jobs:
                job.error = job.error or error
        except BaseException:  # Ctrl-C: what is not committed goes back to the line, what is gets its answers
            if self._connection.in_transaction:
                self._roll_back()
                self._jobs.extendleft(reversed(jobs))
            else:
                settle(jobs, loop)
            raise
        else:
            self._publish(notices)
        settle(jobs, loop)

    def _begin(self, *, patient: bool) -> None:
        if patient != self._is_patient:
            set_patience(self._connection, patient)
            self._is_patient = patient
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not patient and "locked" in str(error):
                raise _Busy from error
            raise
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self._data_version = version
            self._tx.forget()
            foreign = read_notices(self._connection, self._board.cursor)  # what other processes have committed
            if foreign:
                self._board.publish(foreign)
            self._tx.cursor = self._board.cursor
            self._tx.refresh_due()

    def _run_jobs(self, jobs: list[Job], most: int) -> None:
        """Take jobs from the line and run them, appending each to `jobs`."""
        tx = self._tx
        while self._jobs and len(jobs) < most:
            if jobs and (jobs[-1].call.spills or self._jobs[0].call.spills):
                return
            job = self._jobs.popleft()
            jobs.append(job)
            if job.future is not None and job.future.cancelled():
                continue
            now = self._clock()
            if job.call.watchdog and tx.earliest_due is not None:
                look = self._watch.look(tx.earliest_due, now)
                if look is not None:
                    execute(look, tx, now)
                    tx.refresh_due()
            try:
                job.result = execute(job.call, tx, now)
            except sqlite3.Error:
                raise
            except Exception as error:  # goes to the caller
                job.error = error
                if job.call.spills:
                    raise

    def _commit(self) -> list[NoticeFields]:
        tx = self._tx
        tx.flush()
        notices = tx.notices
        if notices:
            tx.write("INSERT INTO notices VALUES (?, ?)", [(notices[-1][1], orjson.dumps(notices))])
        self._commits += 1
        if self._commits % COMMITS_BETWEEN_PRUNES == 0:
            tx.write("DELETE FROM notices WHERE last_cursor < ?", [(tx.cursor - DEFAULT_CAPACITY,)])
            tx.write(_PRUNE_OPEN_SPANS, [()])
        self._connection.execute("COMMIT")
        self._watch_log()
        tx.trim()
        return tx.take_notices()

    def _watch_log(self) -> None:
        """Have the log moved into the file when it is long; other processes make it longer too, so it is measured."""
        if self._path == MEMORY:
            return
        length = log_length(self._path)
        self._log_base = min(self._log_base, length)
        growth = length - self._log_base
        if growth > CHECKPOINT_BYTES and not self._is_checkpointing:
            self._is_checkpointing = True
            self._errands.put(self._checkpoint)
        self._is_log_long = self._is_checkpointing and growth > LONGEST_LOG_BYTES

    def _checkpoint(self) -> None:
        """Move the log into the file: most of it beside the work that goes on, the rest with the turn taken.

        Only a log that is in the file to its last page can be emptied, and while others write, the last pages never
        are.
        """
        self._move_log(beside_work=True)
        with self._turn:
            self._move_log()
            self._log_base = log_length(self._path)
            self._is_checkpointing = self._is_log_long = False
        self._run_patiently()

    def _move_log(self, *, beside_work: bool = False) -> None:
        try:
            if self._path != MEMORY:
                checkpoint(self._path, empties=not beside_work)
        except sqlite3.Error as error:
            logger.warning("Could not checkpoint store '%s', which only makes its log longer: %s", self._path, error)

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
