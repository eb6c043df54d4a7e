"""Transactions on a SQLite connection.

A writing transaction serves a batch of operations. It remembers what it has read, which holds as long as no other
connection has written, and holds rows back until the batch ends; an operation that raises is undone in memory and never
reaches the database. A reading transaction is the same object on a connection of its own, used once.
"""

import sqlite3
from collections.abc import Sequence

from agentlightning.store.notices import NoticeFields
from agentlightning.store.selection import Selection
from agentlightning.store.sql import select_metrics, select_open_spans, select_records, select_spans
from agentlightning.store.sqlite.queue_table import QueueTable
from agentlightning.store.sqlite.record_tables import RecordTables
from agentlightning.store.sqlite.rollout_tables import RolloutTables
from agentlightning.store.sqlite.session import Session
from agentlightning.store.transaction import Record, RecordT, Transaction
from agentlightning.types import (
    Attempt,
    MetricPoint,
    PaginatedResult,
    Rollout,
    Span,
)

__all__ = ["SqliteTransaction"]

_COUNTS = """
SELECT (SELECT count(*) FROM rollouts), (SELECT count(*) FROM attempts), coalesce((SELECT max(number) FROM spans), 0),
       (SELECT count(*) FROM resources), (SELECT count(*) FROM workers), (SELECT count(*) FROM runs),
       (SELECT count(*) FROM queue), coalesce((SELECT bytes_so_far FROM spans ORDER BY number DESC LIMIT 1), 0)
"""
_COUNTED = (
    "total_rollouts",
    "total_attempts",
    "total_spans",
    "total_resources",
    "total_workers",
    "total_runs",
    "queue_length",
    "total_span_bytes",
)


class SqliteTransaction(Transaction):
    """Reads and writes on one connection."""

    def __init__(self, connection: sqlite3.Connection, *, max_span_bytes: int) -> None:
        self.session = Session(connection)
        self._rollouts = RolloutTables(self.session, max_span_bytes=max_span_bytes)
        self._queue = QueueTable(self.session, self._rollouts)
        self._records = RecordTables(self.session)
        self.notices = []
        self._kept_notices = 0
        self.earliest_due: float | None = None
        """No rollout is due before this moment; None if none is scheduled."""

    def forget(self) -> None:
        """Drop everything remembered: another connection has written, or a batch was rolled back."""
        self.session.forget()
        self._rollouts.forget()
        self._queue.forget()
        self._records.forget()
        self.notices = []
        self._kept_notices = 0

    def keep(self) -> None:
        """The operation is done; what it wrote stays."""
        self.session.keep()
        self._kept_notices = len(self.notices)

    def take_back(self) -> None:
        """The operation failed; what it wrote goes."""
        self.session.take_back()
        del self.notices[self._kept_notices :]

    def refresh_due(self) -> None:
        """Read the earliest moment of the schedule."""
        self.earliest_due = self.session.select("SELECT min(due) FROM rollouts WHERE due IS NOT NULL")[0][0]

    def end_batch(self) -> list[NoticeFields]:
        """After a commit: what is to be told."""
        notices, self.notices = self.notices, []
        self._kept_notices = 0
        self.cursor += len(notices)
        self._rollouts.trim()
        self._records.trim()
        return notices

    # ------------------------------------------------------------------ rollouts and attempts

    def get_rollout(self, rollout_id: str) -> Rollout | None:
        entry = self._rollouts.find(rollout_id)
        return None if entry is None else entry.rollout

    def put_rollout(self, rollout: Rollout) -> None:
        self._rollouts.put(rollout)

    def select_rollouts(self, selection: Selection) -> PaginatedResult[Rollout]:
        return self._rollouts.select(selection)

    def get_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        entry = self._rollouts.find(rollout_id)
        return () if entry is None else self._rollouts.attempts_of(entry)

    def put_attempt(self, attempt: Attempt) -> None:
        self._rollouts.put_attempt(attempt)

    def remove_latest_attempt(self, rollout_id: str) -> None:
        self._rollouts.remove_latest_attempt(rollout_id)

    # ------------------------------------------------------------------ spans

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        return self._rollouts.append_spans(attempt, spans, now)

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        return self._rollouts.has_span(attempt, span_id)

    def select_spans(self, rollout_id: str, attempt: Attempt | None, selection: Selection) -> PaginatedResult[Span]:
        return select_spans(self.session, rollout_id, attempt, selection)

    def put_open_spans(self, rollout_id: str, spans: Sequence[Span]) -> None:
        self._rollouts.put_open_spans(rollout_id, spans)

    def get_open_spans(self, rollout_id: str) -> Sequence[Span]:
        return select_open_spans(self.session, rollout_id)

    def get_last_sequence(self, rollout_id: str) -> int:
        return self._rollouts.last_sequence(rollout_id)

    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        self._rollouts.put_last_sequence(rollout_id, sequence_id)

    # ------------------------------------------------------------------ queue and schedule

    def push(self, rollout_id: str, *, front: bool = False) -> None:
        self._queue.push(rollout_id, front=front)

    def pop(self, limit: int) -> Sequence[str]:
        popped: list[str] = []
        while len(popped) < limit and (rollout_id := self._queue.pop()) is not None:
            popped.append(rollout_id)
        return popped

    def unqueue(self, rollout_id: str) -> None:
        self._queue.unqueue(rollout_id)

    def queue_ids(self) -> Sequence[str]:
        return self._queue.ids()

    def schedule(self, rollout_id: str, due: float | None) -> None:
        self._rollouts.set_due(rollout_id, due)
        if due is not None and (self.earliest_due is None or due < self.earliest_due):
            self.earliest_due = due

    def overdue(self, now: float) -> Sequence[str]:
        return self._rollouts.overdue(now)

    # ------------------------------------------------------------------ everything else

    def get_record(self, kind: type[RecordT], key: str) -> RecordT | None:
        return self._records.get(kind, key)

    def put_record(self, record: Record) -> None:
        self._records.put(record)

    def select_records(self, kind: type[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
        return select_records(self.session, kind, selection)

    def get_setting(self, name: str) -> str | None:
        return self._records.get_setting(name)

    def put_setting(self, name: str, value: str) -> None:
        self._records.put_setting(name, value)

    def append_metrics(self, point: MetricPoint) -> None:
        self._records.append_metrics(point)

    def get_metrics(self, run_id: str, step: int | None = None) -> Sequence[MetricPoint]:
        return select_metrics(self.session, run_id, step)

    def relieve(self) -> None:
        self.session.flush()
        self._rollouts.entries.clear()

    def counts(self) -> dict[str, int]:
        row = self.session.select(_COUNTS)[0]
        return dict(zip(_COUNTED, row, strict=True))
