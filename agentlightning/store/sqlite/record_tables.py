"""Resources, workers, runs, grants, settings and metrics in SQLite."""

from typing import Any

from agentlightning.store.rows import RECORD_TABLES, Row
from agentlightning.store.sqlite.session import Session
from agentlightning.store.transaction import Record, RecordT
from agentlightning.store.values import as_json
from agentlightning.types import MetricPoint

__all__ = ["RecordTables"]

CACHED_RECORDS = 2048
"""How many records of a kind are remembered between batches."""


class RecordTables:
    """The tables that are not about rollouts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        session.flush_with(self.flush)
        self.forget()

    def forget(self) -> None:
        """Remember nothing, hold nothing back."""
        self._records: dict[type, dict[str, Any]] = {kind: {} for kind in RECORD_TABLES}
        self._record_rows: dict[tuple[type, str], Row] = {}
        self._settings: dict[str, str | None] = {}
        self._setting_rows: dict[str, str] = {}
        self._metric_rows: list[Row] = []

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
        self._record_rows, self._setting_rows, self._metric_rows = {}, {}, []

    # ------------------------------------------------------------------ records

    def get(self, kind: type[RecordT], key: str) -> RecordT | None:
        record: RecordT | None = self._records[kind].get(key)
        if record is None:
            table = RECORD_TABLES[kind]
            sql = f"SELECT {table.column_list} FROM {table.name} WHERE {table.key} = ?"
            for row in self._session.select_stored(sql, (key,)):  # what is held back is remembered too
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

    # ------------------------------------------------------------------ settings and metrics

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
