"""Transactions on a SQLite connection.

A writing transaction serves a batch of operations. It remembers what it has read, which holds as long as no other
connection has written, and holds rows back until the batch ends; an operation that raises never reaches them. A reading
transaction is the same object on a connection of its own, used once.
"""

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

import orjson

from agentlightning.store.sql import SqlTransaction
from agentlightning.store.tables import ATTEMPT_COLUMNS, RECORD_TABLES, ROLLOUT_COLUMNS, Row, SqlEntry
from agentlightning.store.transaction import Entry, StoreLimits
from agentlightning.types import Attempt

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
