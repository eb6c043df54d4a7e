"""Resources, workers, runs, settings, metrics and answers in SQLite."""

from collections.abc import Sequence
from typing import Any, TypeVar

from agentlightning.store.rows import RECORD_TABLES, Row
from agentlightning.store.sqlite.session import Session
from agentlightning.store.transaction import Answer, Record
from agentlightning.store.values import as_json
from agentlightning.types import MetricPoint, ResourcesUpdate, Run, Worker

__all__ = ["RecordTables"]

RecordT = TypeVar("RecordT", ResourcesUpdate, Worker, Run)

CACHED_RECORDS = 2048
"""How many records of a kind are remembered between batches."""


class RecordTables:
    """The tables that are not about rollouts."""

    def __init__(self, session: Session, *, answer_lifetime_seconds: float) -> None:
        self._session = session
        self._answer_lifetime_seconds = answer_lifetime_seconds
        session.flush_with(self.flush)
        self.forget()

    def forget(self) -> None:
        """Remember nothing, hold nothing back."""
        self._records: dict[type, dict[str, Any]] = {kind: {} for kind in RECORD_TABLES}
        self._record_rows: dict[tuple[type, str], Row] = {}
        self._settings: dict[str, str | None] = {}
        self._setting_rows: dict[str, str] = {}
        self._metric_rows: list[Row] = []
        self._answer_rows: dict[str, Row] = {}
        self._dropped_answers: list[Row] = []

    def trim(self) -> None:
        """Keep the memory within bounds; only when nothing is held back."""
        for records in self._records.values():
            if len(records) > CACHED_RECORDS:
                records.clear()

    def flush(self) -> None:
        write = self._session.write
        for (kind, _), row in self._record_rows.items():
            write(RECORD_TABLES[kind].upsert, [row])
        if self._setting_rows:
            write("INSERT OR REPLACE INTO settings VALUES (?, ?)", self._setting_rows.items())
        if self._metric_rows:
            write("INSERT INTO metrics (run_id, step, time, body) VALUES (?, ?, ?, ?)", self._metric_rows)
        if self._dropped_answers:
            write("DELETE FROM answers WHERE request_id = ?", self._dropped_answers)
        if self._answer_rows:
            self._flush_answers()
        self._record_rows, self._setting_rows, self._metric_rows, self._answer_rows = {}, {}, [], {}
        self._dropped_answers = []

    def _flush_answers(self) -> None:
        newest = max(row[-1] for row in self._answer_rows.values())
        self._session.write("DELETE FROM answers WHERE time < ?", [(newest - self._answer_lifetime_seconds,)])
        self._session.write("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", self._answer_rows.values())

    # ------------------------------------------------------------------ records

    def get(self, kind: type[RecordT], key: str) -> RecordT | None:
        record: RecordT | None = self._records[kind].get(key)
        if record is None:
            table = RECORD_TABLES[kind]
            sql = f"SELECT {table.column_list} FROM {table.name} WHERE {table.key} = ?"
            for row in self._session.select(sql, (key,)):
                record = self._records[kind][key] = table.record_of(row)
        return record

    def put(self, record: Record) -> None:
        kind = type(record)
        table = RECORD_TABLES[kind]
        row = table.row_of(record)
        key: str = row[0]
        before = (self._records[kind].get(key), self._record_rows.get((kind, key)))
        self._session.hold_back(self._restore, kind, key, *before)
        self._records[kind][key] = table.record_of(row)
        self._record_rows[kind, key] = row

    def _restore(self, kind: type, key: str, record: Any, row: Row | None) -> None:
        self._records[kind].pop(key)
        self._record_rows.pop((kind, key), None)
        if record is not None:
            self._records[kind][key] = record
        if row is not None:
            self._record_rows[kind, key] = row

    # ------------------------------------------------------------------ settings, metrics, answers

    def get_setting(self, name: str) -> str | None:
        if name not in self._settings:
            rows = self._session.select("SELECT value FROM settings WHERE name = ?", (name,))
            self._settings[name] = rows[0][0] if rows else None
        return self._settings[name]

    def put_setting(self, name: str, value: str) -> None:
        self._session.hold_back(self._restore_setting, name, self.get_setting(name))
        self._settings[name] = self._setting_rows[name] = value

    def _restore_setting(self, name: str, value: str | None) -> None:
        self._settings[name] = value
        self._setting_rows.pop(name, None)
        if value is not None:
            self._setting_rows[name] = value

    def append_metrics(self, point: MetricPoint) -> None:
        self._metric_rows.append((point.run_id, point.step, point.time, as_json(point.values, "values")))
        self._session.hold_back(self._metric_rows.pop)

    def get_answer(self, request_id: str, now: float) -> Answer | None:
        row = self._answer_rows.get(request_id)
        if row is not None:
            return Answer(row[1], row[2])
        sql = "SELECT operation, body FROM answers WHERE request_id = ? AND time >= ?"
        rows = self._session.select_stored(sql, (request_id, now - self._answer_lifetime_seconds))
        return Answer(*rows[0]) if rows else None

    def put_answer(self, request_id: str, answer: Answer, now: float) -> None:
        self._answer_rows[request_id] = (request_id, answer.request, answer.body, now)
        self._session.hold_back(self._answer_rows.pop, request_id)

    def drop_answers(self, request_ids: Sequence[str]) -> None:
        if any(map(self._answer_rows.get, request_ids)):
            self._session.flush()  # so that the answers are there to be dropped
        self._dropped_answers += [(request_id,) for request_id in request_ids]
        self._session.hold_back(self._dropped_answers.clear)
