"""Transactions on a PostgreSQL connection, each for one operation or a batch of them.

A writing transaction locks the row of a rollout before it reads anything of it, and reads in a statement of its own
after the lock, so that it sees what the last holder of the lock has committed. Rows are held back and sent together
with the COMMIT, in one round trip; a selection sends them before it reads. A reading transaction has one snapshot.

Locks are taken in one order, so that writers wait for each other and do not deadlock: rollouts by their numbers, then
the queue, then workers and runs. `docs/design/transactions.md` has the rules.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final

import orjson

from agentlightning.store.claims import Grant
from agentlightning.store.postgres.rollout_tables import RolloutTransaction
from agentlightning.store.postgres.session import PostgresSession
from agentlightning.store.rows import RECORD_TABLES, Row
from agentlightning.store.selection import Selection
from agentlightning.store.sql import select_metrics, select_records
from agentlightning.store.transaction import Record, RecordT
from agentlightning.store.values import as_json
from agentlightning.types import MetricPoint, PaginatedResult, ResourcesUpdate, Run, Worker

__all__ = ["PostgresTransaction"]

_LOCK_GRANTS: Final = (
    "SELECT pg_advisory_xact_lock(key) FROM "
    "(SELECT hashtextextended(id, 0) AS key FROM unnest(?::text[]) AS id ORDER BY 1) AS keys"
)
"""Copies of a call wait for each other, so that the later one finds the grant and takes nothing meanwhile."""
_PUT_GRANTS: Final = """
INSERT INTO grants SELECT * FROM unnest(?::text[], ?::text[], ?::text[], ?::float8[], ?::bytea[])
ON CONFLICT (grant_id) DO UPDATE SET time = excluded.time, given = excluded.given
"""
_PUT_SETTING: Final = "INSERT INTO settings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_COUNTED: Final = ("rollouts", "attempts", "spans", "resources", "workers", "runs")
_COUNTS: Final = {
    **{f"total_{table}": f"SELECT count(*) FROM {table}" for table in _COUNTED},
    "queue_length": "SELECT count(*) FROM queue",
    "total_span_bytes": "SELECT coalesce(sum(bytes), 0)::bigint FROM spans",
}


class PostgresTransaction(RolloutTransaction):
    """Reads and writes that are committed together; used inside the block of its session."""

    def __init__(self, session: PostgresSession, *, max_span_bytes: int, shares_resources: bool = True) -> None:
        super().__init__(session, max_span_bytes=max_span_bytes)
        # Resources are only locked where they are not just read, or added.
        self._locked = (Worker, Run) if shares_resources else (Worker, Run, ResourcesUpdate)
        self._records: dict[tuple[type, str], Any] = {}
        self._record_rows: dict[tuple[type, str], Row] = {}
        self._settings: dict[str, str | None] = {}
        self._setting_rows: dict[str, str] = {}
        self._metric_rows: list[Row] = []
        self.notices = []  # without cursors, which they get after the commit

    def read_ahead(self, rollout_ids: Collection[str], grant_ids: Collection[str]) -> None:
        """Read in one round trip what operations will need; rollouts are locked in the order of their numbers."""
        keys = list(grant_ids)
        if keys:
            self._session.send(_LOCK_GRANTS, (keys,))
        place = self._send_for_records(Grant, keys) if keys else -1
        self.load(rollout_ids)
        if keys:
            self._keep_records(Grant, keys, place)

    def load_records(self, kind: type, keys: Collection[str]) -> None:
        """Read records in one statement, which locks them in the order of their keys."""
        if keys:
            self._keep_records(kind, keys, self._send_for_records(kind, keys))

    def _send_for_records(self, kind: type, keys: Collection[str]) -> int:
        table = RECORD_TABLES[kind]
        lock = " FOR UPDATE" if kind in self._locked and not self._session.is_reader else ""
        chosen = f"WHERE {table.key} = ANY(?::text[]) ORDER BY {table.key}{lock}"
        return self._session.send(f"SELECT {table.column_list} FROM {table.name} {chosen}", (list(keys),))

    def _keep_records(self, kind: type, keys: Collection[str], place: int) -> None:
        self._records.update(((kind, key), None) for key in keys)
        for row in self._session.fetch(place):
            self._records[kind, row[0]] = RECORD_TABLES[kind].record_of(row)

    def try_lock(self, key: int) -> bool:
        """Whether this transaction now holds an advisory lock, until it ends."""
        return bool(self._session.select("SELECT pg_try_advisory_xact_lock(?)", (key,))[0][0])

    def commit(self) -> None:
        """Send what is held back and the COMMIT; the outcome is known when the pipeline ends."""
        if not self._session.is_reader:
            self._session.flush()
            self.return_popped()
            if self.notices:
                self._session.send("INSERT INTO outbox (body) VALUES (?)", (orjson.dumps(self.notices),))
        self._session.send("COMMIT")

    def _flush(self) -> None:
        super()._flush()
        send = self._session.send
        self._session.put(_PUT_GRANTS, [row for (kind, _), row in self._record_rows.items() if kind is Grant])
        for (kind, _), row in self._record_rows.items():
            if kind is not Grant:
                send(RECORD_TABLES[kind].upsert, row)
        for name, value in self._setting_rows.items():
            send(_PUT_SETTING, (name, value))
        for row in self._metric_rows:
            send("INSERT INTO metrics (run_id, step, time, body) VALUES (?, ?, ?, ?)", row)
        for held_back in (self._record_rows, self._setting_rows, self._metric_rows):
            held_back.clear()

    # ------------------------------------------------------------------ records, settings, metrics

    def get_record(self, kind: type[RecordT], key: str) -> RecordT | None:
        if (kind, key) not in self._records:
            self.load_records(kind, [key])
        record: RecordT | None = self._records[kind, key]
        return record

    def put_record(self, record: Record) -> None:
        kind = type(record)
        table = RECORD_TABLES[kind]
        row = table.row_of(record)
        self._records[kind, row[0]] = table.record_of(row)
        self._record_rows[kind, row[0]] = row

    def select_records(self, kind: type[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
        return select_records(self._session, kind, selection)

    def get_setting(self, name: str) -> str | None:
        if name not in self._settings:
            rows = self._session.select("SELECT value FROM settings WHERE name = ?", (name,))
            self._settings[name] = rows[0][0] if rows else None
        return self._settings[name]

    def put_setting(self, name: str, value: str) -> None:
        self._settings[name] = self._setting_rows[name] = value

    def append_metrics(self, point: MetricPoint) -> None:
        self._metric_rows.append((point.run_id, point.step, point.time, as_json(point.values, "values")))

    def get_metrics(self, run_id: str, step: int | None = None) -> Sequence[MetricPoint]:
        return select_metrics(self._session, run_id, step)

    def relieve(self) -> None:
        self._session.flush()
        self.forget()

    def counts(self) -> dict[str, int]:
        places = {name: self._session.send(sql) for name, sql in _COUNTS.items()}
        return {name: self._session.fetch(place)[0][0] for name, place in places.items()}
