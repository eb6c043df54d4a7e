"""The relay: gives committed notices their cursors and carries them to every process that uses the database.

A transaction leaves its notices in the table `outbox`; a NOTIFY there would make all commits wait in one line. The
relay of each process, on a connection of its own, at most every 20 ms moves what is in the outbox to the table
`notices` and sends one NOTIFY, a hint without content, at which the relays of other processes read that table. One
relay at a time does this, under an advisory lock, so cursors have no holes and come in the order of the commits that a
reader can see. A hint may be lost with a connection, so each relay also looks once a second.

After a crash of the database the outbox is empty and its row 0 is missing: one cursor is then left out, and whoever
follows the notices has a gap.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import orjson
import psycopg

from agentlightning.store.notices import DEFAULT_CAPACITY, NoticeBoard, NoticeFields
from agentlightning.store.postgres.database import NOW, DatabaseClock, connect, described
from agentlightning.store.postgres.session import Connection, PostgresSession
from agentlightning.store.tables import ALL_ROWS, SELECT_NOTICES, notices_of

logger = logging.getLogger(__name__)

HINT_SECONDS: Final = 0.02
"""Between two hints, at least."""
SWEEP_SECONDS: Final = 1.0
"""Between two looks without a hint, at most."""
RECONNECT_SECONDS: Final = 0.25
PRUNE_SECONDS: Final = 60.0
STOP_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 1.0
_RELAY_LOCK: Final = 0x41474C52  # "AGLR"
_CHANNEL: Final = "agl_notices"
_STATE: Final = (
    "SELECT coalesce((SELECT max(last_cursor) FROM notices), 0), EXISTS (SELECT 1 FROM outbox WHERE number = 0)"
)
_EMPTY: Final = "DELETE FROM outbox WHERE number > 0 RETURNING number, body"
_PRUNES: Final = (
    f"DELETE FROM notices WHERE last_cursor < (SELECT max(last_cursor) FROM notices) - {DEFAULT_CAPACITY}",
    "DELETE FROM open_spans USING rollouts WHERE number = rollout AND status NOT IN ('preparing', 'running')",
)


def read_notices(connection: Connection, after: int, most_rows: int = ALL_ROWS) -> list[NoticeFields]:
    """Notices behind a cursor."""
    with PostgresSession(connection, is_reader=True) as session:
        rows = session.select(SELECT_NOTICES, (after, most_rows))
        session.send("COMMIT")
    return notices_of(rows, after)


class Relay:
    """A thread with a connection of its own."""

    def __init__(self, dsn: str, board: NoticeBoard, clock: DatabaseClock) -> None:
        self._dsn = dsn
        self.name = described(dsn)
        self._board = board
        self._clock = clock
        self._is_stopped = False
        self._next_prune = 0.0
        self._bell, self._ear = socket.socketpair()
        self._bell.settimeout(0)
        self._ear.settimeout(0)
        self._schedule = threading.Lock()  # protects the two below
        self._scheduled_here: float | None = None  # since the relay last looked
        self._seen: float | None = None  # in the database
        self._looked = threading.Condition()  # protects the number of looks that have begun and ended
        self._begun = self._ended = 0
        self.before_end: Callable[[], None] = lambda: None
        """Called in the relay's thread when it has stopped."""
        self._thread = threading.Thread(target=self._run, name="agl-store-relay", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """A transaction with notices has been committed."""
        with suppress(BlockingIOError, OSError):  # it rings already, or has stopped
            self._bell.send(b"\0")

    def settle(self) -> None:
        """Wait until all that was committed here before has its cursor; not for long, if the database is away."""
        with self._looked:
            looks = self._begun + 1
            self.ring()
            self._looked.wait_for(lambda: self._ended >= looks, SETTLE_SECONDS)

    def stop_soon(self) -> None:
        """Have what is left carried and the connection closed, without waiting; takes no lock."""
        self._is_stopped = True
        self.ring()

    def stop(self) -> None:
        """Carry what is left, then let go of the connection."""
        self.stop_soon()
        self._thread.join(STOP_SECONDS)

    # ------------------------------------------------------------------ the watchdog's schedule

    @property
    def earliest_due(self) -> float | None:
        """No rollout is due before this moment, as far as is known here; None if none is scheduled."""
        return min((due for due in (self._seen, self._scheduled_here) if due is not None), default=None)

    def schedule(self, due: float | None) -> None:
        """A moment that a transaction of this process has scheduled."""
        if due is not None and (self._scheduled_here is None or due < self._scheduled_here):
            with self._schedule:
                before, self._scheduled_here = self.earliest_due, due
            if before is None or due < before:
                self._board.wake_everyone()

    def refresh_due(self, connection: Connection) -> None:
        """Read the earliest moment of the schedule, and the time."""
        before, here = self.earliest_due, self._scheduled_here
        row = connection.execute(f"SELECT min(due), {NOW} FROM rollouts WHERE due IS NOT NULL").fetchone()
        assert row is not None  # an aggregate has one row
        self._clock.set(row[1])
        with self._schedule:
            self._seen = row[0]
            if self._scheduled_here == here:  # else another was scheduled meanwhile, which may not have been seen
                self._scheduled_here = None
        due = self.earliest_due
        if due is not None and (before is None or due < before):
            self._board.wake_everyone()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._connect_and_serve()
        finally:
            self.before_end()
            self._bell.close()
            self._ear.close()

    def _connect_and_serve(self) -> None:
        has_failed = False
        while True:
            try:
                with connect(self._dsn) as connection:
                    connection.execute(f"LISTEN {_CHANNEL}")
                    connection.execute("SET synchronous_commit = off")  # a crash of the database leaves a gap
                    if has_failed:
                        has_failed = False
                        logger.info("Store '%s' is back.", self.name)
                        self._board.wake_everyone()
                    self._serve(connection)
                    return
            except psycopg.Error as error:
                if not has_failed and not self._is_stopped:
                    logger.warning("Store '%s' cannot be reached, which is tried again: %s", self.name, error)
            except Exception:  # waiters depend on this thread, so it goes on
                logger.exception("The relay of store '%s' failed, and begins anew.", self.name)
            has_failed = True
            if self._is_stopped:
                return
            time.sleep(RECONNECT_SECONDS)

    def _serve(self, connection: Connection) -> None:
        while True:
            is_last = self._is_stopped
            with self._looked:
                self._begun += 1
            self._look(connection)
            with self._looked:
                self._ended = self._begun
                self._looked.notify_all()
            if is_last:
                return
            began = time.monotonic()
            select.select([self._ear.fileno(), connection.fileno()], [], [], SWEEP_SECONDS)
            time.sleep(max(0.0, began + HINT_SECONDS - time.monotonic()))
            with suppress(BlockingIOError):  # all rings and hints that have come are served by one look
                while self._ear.recv(4096):
                    pass
            for _ in connection.notifies(timeout=0):
                pass

    def _look(self, connection: Connection) -> None:
        """Two round trips, under an advisory lock: what there is, and what becomes of it."""
        with PostgresSession(connection) as session:
            session.send("SELECT pg_advisory_xact_lock(?)", (_RELAY_LOCK,))
            state, left = session.send(_STATE), session.send(_EMPTY)
            newest, is_marked = session.fetch(state)[0]
            last = newest if is_marked else newest + 1
            committed = [fields for _, body in sorted(session.fetch(left)) for fields in orjson.loads(body)]
            notices = [(kind, last + place, *others) for place, (kind, _, *others) in enumerate(committed, 1)]
            last += len(notices)
            if not is_marked:
                session.send("INSERT INTO outbox VALUES (0, '')")
            if last > newest:
                session.send("INSERT INTO notices VALUES (?, ?)", (last, orjson.dumps(notices)))
                session.send(f"NOTIFY {_CHANNEL}")
            session.send("COMMIT")
        self.refresh_due(connection)
        if newest == self._board.cursor and is_marked:
            if notices:
                self._board.publish(notices)
        elif last > self._board.cursor:
            self._catch_up(connection, last)
        if time.monotonic() >= self._next_prune:
            self._next_prune = time.monotonic() + PRUNE_SECONDS
            for sql in _PRUNES:
                connection.execute(sql)

    def _catch_up(self, connection: Connection, last: int) -> None:
        """Publish what other relays have numbered, from the last hole on."""
        notices = read_notices(connection, self._board.cursor)
        start = len(notices)
        while start and notices[start - 1][1] == last - (len(notices) - start):
            start -= 1
        notices = notices[start:]
        if not notices:
            self._board.skip_to(last)
            return
        if notices[0][1] > self._board.cursor + 1:
            self._board.skip_to(notices[0][1] - 1)
        self._board.publish(notices)
