"""The PostgreSQL store: durable, and shared by every server and program that opens its database.

A few threads take the writes that wait, up to 64 at once, and run them in one transaction; if one of them is refused,
each is run in a transaction of its own. Reads have threads of their own. Waiters are woken by notices, which a relay
carries between processes. A transaction that the database has not taken is run again; one of which it is not known
whether it was taken raises `StoreUnavailable`, and its operations are safe to repeat under their request ids.
"""

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus

from agentlightning.errors import StoreUnavailable
from agentlightning.store.base import LightningStoreCapabilities
from agentlightning.store.behaviour.claims import return_claims
from agentlightning.store.behaviour.requests import CLAIMS, claimed_ids
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS
from agentlightning.store.local import (
    ANSWER_LIFETIME_SECONDS,
    DEFAULT_MAX_SPAN_BYTES,
    Call,
    Clock,
    LocalStore,
    execute,
)
from agentlightning.store.notices import NoticeBoard, NoticeFields
from agentlightning.store.postgres.database import (
    RETRIED,
    described,
    open_pool,
    prepare,
    store_errors,
)
from agentlightning.store.postgres.prefetch import read_ahead
from agentlightning.store.postgres.relay import Relay, read_notices
from agentlightning.store.postgres.session import Connection, PostgresSession
from agentlightning.store.postgres.transaction import PostgresTransaction
from agentlightning.types import Notice
from agentlightning.utils.metrics import MetricsBackend

__all__ = ["PostgresLightningStore"]

WRITERS: Final = 2
"""Threads that write; more of them would make smaller batches."""
READERS: Final = 8
LARGEST_BATCH: Final = 64
NOTICES_AT_HAND: Final = 1000
"""Older ones are read from the database."""
MOST_TRIES: Final = 20
_WATCHDOG_LOCK: Final = 0x41474C57  # "AGLW"


@dataclass(slots=True)
class _Write:
    """A call that writes, and who waits for its result."""

    call: Call
    future: "asyncio.Future[Any] | None" = None
    """None if nobody does."""
    result: Any = None
    error: BaseException | None = None


class _Working:
    """The threads and connections of a store that is in use; a forked child leaves its parent's behind."""

    def __init__(self, dsn: str, board: NoticeBoard, clock: Clock) -> None:
        self.pool = open_pool(dsn, WRITERS + READERS)
        self.writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="agl-store-writer")
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="agl-store-reader")
        self.relay = Relay(dsn, board, clock)
        self.relay.before_end = self.pool.close
        self._turn = threading.Lock()  # protects the two below
        self._writes: deque[_Write] = deque()
        self._rounds: set[asyncio.AbstractEventLoop] = set()  # loops that will call a thread at the end of their round

    def add(self, write: _Write, run: Callable[["_Working"], None]) -> None:
        """Have a write run in a writer's thread, with others that wait; those of one round of a loop go together."""
        loop = None if write.future is None else write.future.get_loop()
        with self._turn:
            self._writes.append(write)
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
            except RuntimeError:  # the store was closed meanwhile
                refused = [write.future for write in self._writes if write.future is not None]
                for future in refused:
                    if future.get_loop() is loop and not future.done():
                        future.set_exception(StoreUnavailable("The store was closed before it came to this; open it."))

    def take(self, run: Callable[["_Working"], None]) -> list[_Write]:
        """Writes to be run together; a large one alone."""
        taken: list[_Write] = []
        with self._turn:
            while self._writes and len(taken) < LARGEST_BATCH and not (taken and self._writes[0].call.is_large):
                write = self._writes.popleft()
                if write.future is None or not write.future.cancelled():
                    taken.append(write)
                if write.call.is_large:
                    break
            if self._writes:
                self.writers.submit(run, self)
        return taken

    def let_go(self) -> None:
        """The store was forgotten without being closed. Called by the garbage collector, so it waits for nothing."""
        self.writers.shutdown(wait=False)
        self.readers.shutdown(wait=False)
        self.relay.stop_soon()

    def close(self) -> None:
        """Finish what was begun and let go of the database."""
        self.writers.shutdown()
        self.readers.shutdown()
        self.relay.stop()


class PostgresLightningStore(LocalStore):
    """A store in a PostgreSQL database."""

    def __init__(
        self,
        dsn: str,
        *,
        max_span_bytes: int = DEFAULT_MAX_SPAN_BYTES,
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
            tracker: Measures every operation.
            scan_debounce_seconds: Least time between two looks of the watchdog.
            lost_worker_seconds: How long a worker with heartbeats may be silent until what it claimed is given back.
            clock: Seconds since the epoch; for tests.
        """
        super().__init__(
            max_span_bytes=max_span_bytes,
            tracker=tracker,
            scan_debounce_seconds=scan_debounce_seconds,
            lost_worker_seconds=lost_worker_seconds,
            clock=clock,
            kept_notices=NOTICES_AT_HAND,
        )
        self.address = described(dsn)
        """The database, without a password."""
        self._dsn = dsn
        self._options: dict[str, Any] = {
            "max_span_bytes": max_span_bytes,
            "scan_debounce_seconds": scan_debounce_seconds,
            "lost_worker_seconds": lost_worker_seconds,
        }
        self._starting = threading.Lock()  # protects `_working` and `_is_closed`
        self._looking = threading.Lock()  # protects `_watch`
        self._working: _Working | None = None
        self._left_behind: list[_Working] = []  # a parent process's, which this one must not touch
        self._is_closed = False
        self._board.start_at(prepare(dsn))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self._dsn, **self._options), ()

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": False}

    # ------------------------------------------------------------------ threads

    def _work(self) -> _Working:
        working = self._working
        return working if working is not None else self._start_working()

    def _start_working(self) -> _Working:
        """Start the threads on first use, so that a store may be handed to another process before."""
        with self._starting:
            if self._is_closed:
                raise StoreUnavailable(f"Store '{self.address}' is closed; open it again with PostgresLightningStore.")
            if self._working is None:
                self._working = _Working(self._dsn, self._board, self._clock)
                self._forgotten = weakref.finalize(self, self._working.let_go)
                if hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_child=partial(_leave_behind, weakref.ref(self)))
            return self._working

    async def close(self) -> None:
        with self._starting:
            self._is_closed = True
            working, self._working = self._working, None
        if working is not None:
            self._forgotten.detach()
            await asyncio.get_running_loop().run_in_executor(None, working.close)
        self._board.wake_everyone()

    # ------------------------------------------------------------------ transactions

    def _run_write(self, call: Call) -> "asyncio.Future[Any]":
        future = asyncio.get_running_loop().create_future()
        self._work().add(_Write(call, future), self._run_writes)
        return future

    def _run_read(self, call: Call) -> "asyncio.Future[Any]":
        working = self._work()
        return asyncio.wrap_future(working.readers.submit(self._read_now, working, call))

    async def _run_claim(self, call: Call) -> Any:
        future = self._run_write(call)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                _give_back(self, _Write(call, result=future.result()))
            raise

    def _run_writes(self, working: _Working) -> None:
        """Run what waits: together if that succeeds, else each alone, so that nobody fails for another."""
        writes = working.take(self._run_writes)
        if len(writes) > 1 and self._run_together(working, writes):
            self._settle(writes)
            return
        for write in writes:
            try:
                (write.result,) = self._write_now(working, [write.call])
            except Exception as error:  # noqa: BLE001 # it goes to the caller
                write.error = error
            self._settle([write])

    def _run_together(self, working: _Working, writes: Sequence[_Write]) -> bool:
        """Run writes in one transaction; False if one of them was refused, and nothing remains."""
        try:
            results = self._write_now(working, [write.call for write in writes])
        except _Spoiled:
            return False
        except Exception as error:  # noqa: BLE001 # every caller of the batch must be told
            for write in writes:
                write.error = error
        else:
            for write, result in zip(writes, results, strict=True):
                write.result = result
        return True

    def _settle(self, writes: Sequence[_Write]) -> None:
        """Hand results to the loops that wait for them, once a loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Write]] = {}
        for write in writes:
            if write.future is not None:
                by_loop.setdefault(write.future.get_loop(), []).append(write)
        for loop, of_loop in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._answer, of_loop)
            except RuntimeError:  # the loop is closed
                for write in of_loop:
                    _give_back(self, write)

    def _answer(self, writes: Sequence[_Write]) -> None:
        """Runs in the loop of the futures."""
        for write in writes:
            future = write.future
            if future is None or future.done():
                _give_back(self, write)
            elif write.error is not None:
                future.set_exception(write.error)
            else:
                future.set_result(write.result)

    def _write_now(self, working: _Working, calls: Sequence[Call]) -> list[Any]:
        with store_errors(self.address):
            if any(call.watchdog for call in calls):
                self._look(working)
            return self._transact(working, calls, is_reader=False)

    def _read_now(self, working: _Working, call: Call) -> Any:
        with store_errors(self.address):
            if call.watchdog:
                self._look(working)
            return self._transact(working, [call], is_reader=True)[0]

    def _look(self, working: _Working) -> None:
        """Mark overdue attempts, if it is time."""
        now, due = self._clock(), working.relay.earliest_due
        if due is None and now < self._watch.next_sweep:
            return
        with self._looking:
            look = self._watch.look(due, now)
        if look is not None:
            self._transact(working, [Call("watchdog", partial(_look_alone, look))], is_reader=False)
            with working.pool.connection() as connection:
                working.relay.refresh_due(connection)

    def _transact(self, working: _Working, calls: Sequence[Call], *, is_reader: bool) -> list[Any]:
        """Run calls in one transaction, until the database takes it or refuses it for good."""
        for _ in range(MOST_TRIES - 1):
            with suppress(*RETRIED, _BrokenConnection):
                return self._try(working, calls, is_reader)
        return self._try(working, calls, is_reader)

    def _try(self, working: _Working, calls: Sequence[Call], is_reader: bool) -> list[Any]:
        connection = working.pool.getconn()
        is_committing = False
        try:
            with PostgresSession(connection, is_reader=is_reader) as session:
                tx = PostgresTransaction(
                    session,
                    max_span_bytes=self.max_span_bytes,
                    answer_lifetime_seconds=ANSWER_LIFETIME_SECONDS,
                    shares_resources=all(call.name != "update_resources" for call in calls),
                )
                now = self._clock()
                read_ahead(tx, calls, now)
                results = [execute(call, tx, now) for call in calls]
                is_committing = True
                tx.commit()
        except Exception as error:
            if isinstance(error, psycopg.Error) and connection.closed:
                if is_committing and not is_reader:
                    raise StoreUnavailable(
                        f"Store '{self.address}' was lost while '{calls[0].name}' was being committed, so it may have "
                        "taken effect or not; repeat it under the same request id, or look first."
                    ) from error
                working.pool.check()  # drops what else broke with it, so that the next try has a new one
                raise _BrokenConnection(str(error)) from error
            if len(calls) == 1 or isinstance(error, (*RETRIED, psycopg.OperationalError)):
                raise
            raise _Spoiled from error
        finally:
            _hand_back(working, connection)
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

    async def _notices_after(self, cursor: int) -> Sequence[Notice] | None:
        notices = self._board.after(cursor)
        if notices is not None:
            return notices
        kept = await asyncio.wrap_future(self._work().readers.submit(self._read_notices, cursor))
        if not kept or kept[0][1] > cursor + 1:
            return None
        # Up to the next hole, which a crash of the database may have left.
        return [Notice(*fields) for place, fields in enumerate(kept, 1) if fields[1] == cursor + place]

    async def _latest_cursor(self) -> int:
        kept = await asyncio.wrap_future(self._work().readers.submit(self._read_notices, self._board.cursor))
        return kept[-1][1] if kept else self._board.cursor

    def _read_notices(self, cursor: int) -> list[NoticeFields]:
        with store_errors(self.address), self._work().pool.connection() as connection:
            return read_notices(connection, cursor)


class _Spoiled(Exception):
    """An operation of a batch was refused, and with it the batch, of which nothing remains."""


class _BrokenConnection(psycopg.OperationalError):
    """The connection broke before the transaction was committed, so nothing of it remains."""


def _hand_back(working: _Working, connection: Connection) -> None:
    if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
        with suppress(psycopg.Error):  # the pool replaces a connection that has broken
            connection.rollback()
    working.pool.putconn(connection)


def _look_alone(look: Call, tx: PostgresTransaction, now: float) -> None:
    """The watchdog, unless that of another process is looking."""
    if tx.try_lock(_WATCHDOG_LOCK):
        look.behaviour(tx, now, *look.args, **look.kwargs)


# ---------------------------------------------------------------------- callers and processes that are gone


def _give_back(store: PostgresLightningStore, write: _Write) -> None:
    """Return what was claimed for a caller who is gone; one with a request id will ask again."""
    if write.error is None and write.call.request_id is None and write.call.name in CLAIMS:
        returning = partial(return_claims, rollout_attempt_ids=claimed_ids(write.result))
        with suppress(StoreUnavailable, RuntimeError):  # the store was closed meanwhile
            store._work().add(_Write(Call("returned_claims", returning)), store._run_writes)


def _leave_behind(store_reference: "weakref.ref[PostgresLightningStore]") -> None:
    """In a forked child: threads are gone, and the parent's connections are the parent's."""
    store = store_reference()
    if store is not None:
        store._starting, store._looking = threading.Lock(), threading.Lock()
        if store._working is not None:
            store._forgotten.detach()
            store._left_behind.append(store._working)
            store._working = None
