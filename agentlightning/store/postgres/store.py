"""The PostgreSQL store: durable, and shared by every server and program that opens its database.

A few threads take the writes that wait, up to 64 at once, and run them in one transaction; if one of them is refused,
each is run in a transaction of its own. Reads have threads of their own. Waiters are woken by notices, which a relay
carries between processes. A transaction that the database has not taken is run again; one of which it is not known
whether it was taken raises `StoreUnavailable`, and its operations are safe to repeat with the same ids.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

import psycopg
from psycopg.pq import TransactionStatus

from agentlightning.errors import StoreUnavailable
from agentlightning.store.durable import NOTICES_AT_HAND, DurableStore, Job, closed_store, settle
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS
from agentlightning.store.local import (
    DEFAULT_MAX_ATTEMPT_BYTES,
    DEFAULT_MAX_ATTEMPT_SPANS,
    DEFAULT_MAX_SPAN_BYTES,
    Call,
    Clock,
    execute,
)
from agentlightning.store.notices import NoticeBoard, NoticeFields
from agentlightning.store.postgres.database import (
    NOW,
    RETRIED,
    DatabaseClock,
    described,
    open_pool,
    prepare,
    store_errors,
)
from agentlightning.store.postgres.relay import Relay, read_notices
from agentlightning.store.postgres.session import PostgresSession
from agentlightning.store.postgres.transaction import PostgresTransaction, read_ahead
from agentlightning.store.tables import ALL_ROWS
from agentlightning.utils.metrics import MetricsBackend

WRITERS: Final = 2
"""Threads that write; more of them would make smaller batches."""
READERS: Final = 8
LARGEST_BATCH: Final = 64
MOST_TRIES: Final = 20
_WATCHDOG_LOCK: Final = 0x41474C57  # "AGLW"


class _Working:
    """The threads and connections of a store that is in use."""

    def __init__(self, dsn: str, board: NoticeBoard, clock: DatabaseClock) -> None:
        self.pool = open_pool(dsn, WRITERS + READERS)
        self.writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="agl-store-writer")
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="agl-store-reader")
        self.relay = Relay(dsn, board, clock)
        self.relay.before_end = self.pool.close
        self.looking = threading.Lock()  # protects the store's `_watch`
        self._turn = threading.Lock()  # protects the two below
        self._jobs: deque[Job] = deque()
        self._rounds: set[asyncio.AbstractEventLoop] = set()  # loops that will call a thread at the end of their round

    def add(self, job: Job, run: Callable[["_Working"], None]) -> None:
        """Have a job run in a writer's thread, with others that wait; those of one round of a loop go together."""
        loop = None if job.future is None else job.future.get_loop()
        with self._turn:
            self._jobs.append(job)
            if loop is None:
                self.writers.submit(run, self)
            elif loop not in self._rounds:
                self._rounds.add(loop)
                loop.call_soon(self._end_round, loop, run)

    def _end_round(self, loop: asyncio.AbstractEventLoop, run: Callable[["_Working"], None]) -> None:
        with self._turn:
            self._rounds.discard(loop)
            try:
                self.writers.submit(run, self)
                return
            except RuntimeError:  # the store was closed meanwhile
                refused = list(self._jobs)
                self._jobs.clear()
        for job in refused:
            job.error = closed_store(self.relay.name)
        settle(refused)

    def take(self, run: Callable[["_Working"], None]) -> list[Job]:
        """Jobs to be run together."""
        with self._turn:
            taken = [self._jobs.popleft() for _ in range(min(len(self._jobs), LARGEST_BATCH))]
            if self._jobs:
                self.writers.submit(run, self)
        return [job for job in taken if job.future is None or not job.future.cancelled()]

    def let_go(self) -> None:
        self.writers.shutdown(wait=False)
        self.readers.shutdown(wait=False)
        self.relay.stop_soon()

    def close(self) -> None:
        self.writers.shutdown()
        self.readers.shutdown()
        self.relay.stop()


class PostgresLightningStore(DurableStore[_Working]):
    """A store in a PostgreSQL database."""

    def __init__(
        self,
        dsn: str,
        *,
        max_span_bytes: int = DEFAULT_MAX_SPAN_BYTES,
        max_attempt_bytes: int = DEFAULT_MAX_ATTEMPT_BYTES,
        max_attempt_spans: int = DEFAULT_MAX_ATTEMPT_SPANS,
        tracker: MetricsBackend | None = None,
        scan_debounce_seconds: float = 0.0,
        lost_worker_seconds: float = LOST_WORKER_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        """Open a database, and create the tables if it has none.

        Args:
            dsn: `postgresql://user@host:5432/database`, or another connection string of PostgreSQL. A password is
                better left to `PGPASSWORD` or a `.pgpass` file.
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
        self.address = described(dsn)
        """The database, without a password."""
        cursor, self._database_clock = prepare(dsn)
        others = {"tracker": tracker, "clock": clock or self._database_clock, "kept_notices": NOTICES_AT_HAND}
        super().__init__(self.address, dsn, options, **others)
        self._board.start_at(cursor)

    # ------------------------------------------------------------------ threads

    def _open(self) -> _Working:
        return _Working(self._given, self._board, self._database_clock)

    # ------------------------------------------------------------------ transactions

    def _submit(self, working: _Working, job: Job) -> None:
        working.add(job, self._run_writes)

    async def _run_read(self, call: Call) -> object:
        working = self._work()
        reading = working.readers.submit(self._perform, working, [call], is_reader=True)
        return (await asyncio.wrap_future(reading))[0]

    def _run_writes(self, working: _Working) -> None:
        """Run what waits: together if that succeeds, else each alone, so that nobody fails for another."""
        jobs = working.take(self._run_writes)
        if jobs and not self._run_batch(working, jobs):
            for job in jobs:
                self._run_batch(working, [job])

    def _run_batch(self, working: _Working, jobs: Sequence[Job]) -> bool:
        """Run jobs in one transaction and answer them; False if one of several was refused, and nothing remains."""
        try:
            results = self._perform(working, [job.call for job in jobs])
        except _Spoiled:
            return False
        except Exception as error:  # noqa: BLE001 # every caller of the batch must be told
            for job in jobs:
                job.error = error
        else:
            for job, result in zip(jobs, results, strict=True):
                job.result = result
        settle(jobs)
        return True

    def _perform(self, working: _Working, calls: Sequence[Call], *, is_reader: bool = False) -> list[object]:
        """Run calls in one transaction, with overdue attempts marked before it."""
        with store_errors(self.address):
            if any(call.watchdog for call in calls):
                self._look(working)
            return self._transact(working, calls, is_reader=is_reader)

    def _look(self, working: _Working) -> None:
        """Mark overdue attempts, if it is time."""
        now, due = self._clock(), working.relay.earliest_due
        if due is None:
            return
        with working.looking:
            look = self._watch.look(due, now)
        if look is not None:
            self._transact(working, [Call("watchdog", partial(_look_alone, look))], is_reader=False)
            with working.pool.connection() as connection:
                working.relay.refresh_due(connection)

    def _transact(self, working: _Working, calls: Sequence[Call], *, is_reader: bool) -> list[object]:
        """Run calls in one transaction, until the database takes it or refuses it for good."""
        for _ in range(MOST_TRIES - 1):
            with suppress(*RETRIED, _BrokenConnection):
                return self._try(working, calls, is_reader)
        return self._try(working, calls, is_reader)

    def _try(self, working: _Working, calls: Sequence[Call], is_reader: bool) -> list[object]:
        connection = working.pool.getconn()
        is_committing = False
        try:
            with PostgresSession(connection, is_reader=is_reader) as session:
                is_shared = all(call.name != "update_resources" for call in calls)
                tx = PostgresTransaction(session, self._limits, shares_resources=is_shared)
                sent = session.send(f"SELECT {NOW}") if self._clock is self._database_clock else None
                read_ahead(tx, calls)
                now: float = self._clock() if sent is None else session.fetch(sent)[0][0]
                results = [execute(call, tx, now) for call in calls]
                is_committing = True
                tx.commit()
        except Exception as error:
            if isinstance(error, psycopg.Error) and connection.closed:
                if is_committing and not is_reader:
                    raise StoreUnavailable(
                        f"Store '{self.address}' was lost while '{calls[0].name}' was being committed, so it may have "
                        "taken effect or not; repeat it with the same ids, or look first."
                    ) from error
                working.pool.check()  # drops what else broke with it, so that the next try has a new one
                raise _BrokenConnection(str(error)) from error
            if len(calls) == 1 or isinstance(error, (*RETRIED, psycopg.OperationalError)):
                raise
            raise _Spoiled from error
        finally:
            if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
                with suppress(psycopg.Error):  # the pool replaces a connection that has broken
                    connection.rollback()
            working.pool.putconn(connection)
        working.relay.schedule(tx.earliest_due)
        if tx.notices:
            working.relay.ring()
        return results

    # ------------------------------------------------------------------ waiting

    def _next_due(self) -> float | None:
        return self._work().relay.earliest_due

    def _newest_cursor(self) -> int:
        if self._working is not None:
            self._working.relay.settle()
        return self._board.cursor

    def _read_notices(self, cursor: int, most_rows: int = ALL_ROWS) -> list[NoticeFields]:
        with store_errors(self.address), self._work().pool.connection() as connection:
            return read_notices(connection, cursor, most_rows)


class _Spoiled(Exception):
    """An operation of a batch was refused, and with it the batch, of which nothing remains."""


class _BrokenConnection(psycopg.OperationalError):
    """The connection broke before the transaction was committed, so nothing of it remains."""


def _look_alone(look: Call, tx: PostgresTransaction, now: float) -> None:
    """The watchdog, unless that of another process is looking."""
    if tx.try_lock(_WATCHDOG_LOCK):
        look.behaviour(tx, now, *look.args, **look.kwargs)
