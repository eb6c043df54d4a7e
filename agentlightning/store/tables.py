"""Tables: how rollouts, attempts and the keyed records lie in their rows, in SQLite and in PostgreSQL alike."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson

from agentlightning.store.copies import replaced
from agentlightning.store.notices import NoticeFields
from agentlightning.store.transaction import RECORD_KEYS, Entry, Setting
from agentlightning.store.values import as_json
from agentlightning.types import Attempt, ResourcesUpdate, Rollout, RolloutConfig, Run, Worker

Row = tuple[Any, ...]

ROLLOUT_COLUMNS = "rollout_id, status, mode, resources_id, start_time, end_time, config, metadata, output"
ATTEMPT_COLUMNS = (
    "rollout, sequence_id, attempt_id, status, start_time, end_time, worker_id, last_heartbeat_time, metadata, "
    "lease_until, heartbeat_span"
)
SELECT_NOTICES = "SELECT body FROM notices WHERE last_cursor > ? ORDER BY last_cursor LIMIT ?"
ALL_ROWS = 2**31
_CLAIMS = "workers.claims"
READ_ROLLOUTS = f"""
SELECT r.number, q.position, r.due, x.reward, i.body, {", ".join(f"r.{name}" for name in ROLLOUT_COLUMNS.split(", "))},
       a.sequence_id, a.attempt_id, a.status, a.start_time, a.end_time, a.worker_id,
       coalesce((SELECT arrival_time FROM spans
                 WHERE spans.rollout = a.rollout AND spans.attempt = a.sequence_id AND spans.number > a.heartbeat_span
                 ORDER BY spans.number DESC LIMIT 1), a.last_heartbeat_time),
       a.metadata, a.lease_until
FROM rollouts r
JOIN inputs i ON i.rollout = r.number
LEFT JOIN rollout_index x ON x.rollout = r.number
LEFT JOIN queue q ON q.rollout = r.number
LEFT JOIN attempts a ON a.rollout = r.number
WHERE r.{{}} ORDER BY r.number, a.sequence_id
"""
ROLLOUT_WIDTH = 5 + len(ROLLOUT_COLUMNS.split(", "))
"""Columns of `READ_ROLLOUTS` before those of the attempt."""


def migrations() -> list[str]:
    """The scripts that make the tables, in the order of their numbers, in SQLite's dialect."""
    folder = resources.files("agentlightning.store") / "migrations"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return [file.read_text(encoding="utf-8") for file in files]


def notices_of(rows: Iterable[Row], after: int) -> list[NoticeFields]:
    """The notices behind a cursor, from the rows of `SELECT_NOTICES`."""
    notices = [tuple(fields) for (body,) in rows for fields in orjson.loads(body)]
    return [fields for fields in notices if fields[1] > after]


# ---------------------------------------------------------------------- rows


@dataclass(slots=True, eq=False)
class SqlEntry(Entry):
    """A rollout as a transaction knows it."""

    json: Row = ()
    """Configuration, metadata and output, as they lie in the row."""

    @property
    def new_row(self) -> Row:
        rollout = self.rollout
        described = (rollout.rollout_id, rollout.status, rollout.mode, rollout.resources_id)
        return (self.number, *described, rollout.start_time, rollout.end_time, *self.json, self.due)

    @property
    def changed_row(self) -> Row:
        rollout = self.rollout
        described = (rollout.status, rollout.mode, rollout.resources_id, rollout.end_time)
        return (*described, *self.json, self.due, self.number)


def entry_of(row: Row) -> SqlEntry:
    number, position, due, reward, body, *columns = row[:ROLLOUT_WIDTH]
    rollout_id, status, mode, resources_id, start_time, end_time, config, metadata, output = columns
    rollout = Rollout(
        rollout_id=rollout_id,
        input=orjson.loads(body),
        start_time=start_time,
        end_time=end_time,
        mode=mode,
        resources_id=resources_id,
        status=status,
        config=_config_of(config),
        metadata=orjson.loads(metadata),
        output=None if output is None else orjson.loads(output),
        reward=reward,
    )
    return SqlEntry(rollout, number, position=position, due=due, json=(config, metadata, output))


@functools.lru_cache(256)
def _config_of(body: bytes) -> RolloutConfig:
    """Most rollouts share their configuration, which is never changed in place."""
    return RolloutConfig.model_validate_json(body)


def attempt_of(row: Row, rollout_id: str) -> Attempt:
    sequence_id, attempt_id, status, start_time, end_time, worker_id, last_heartbeat_time, metadata, lease_until = row
    return Attempt(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        start_time=start_time,
        end_time=end_time,
        status=status,
        worker_id=worker_id,
        last_heartbeat_time=last_heartbeat_time,
        metadata=orjson.loads(metadata),
        lease_until=lease_until,
    )


def attempt_row(attempt: Attempt, rollout_number: int) -> Row:
    """Without the number of the newest span, which its heartbeat covers."""
    described = (attempt.attempt_id, attempt.status, attempt.start_time, attempt.end_time, attempt.worker_id)
    metadata = as_json(attempt.metadata, "metadata")
    return (rollout_number, attempt.sequence_id, *described, attempt.last_heartbeat_time, metadata, attempt.lease_until)


@dataclass(frozen=True)
class RecordTable:
    """A table of records under one key: plain columns first, JSON columns behind them."""

    name: str
    columns: tuple[str, ...]
    """The key first."""
    json_columns: tuple[str, ...]
    model: Callable[..., Any]

    @functools.cached_property
    def column_list(self) -> str:
        return ", ".join((*self.columns, *self.json_columns))

    @functools.cached_property
    def upsert(self) -> str:
        names = (*self.columns, *self.json_columns)
        changes = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        marks = ", ".join("?" * len(names))
        insert = f"INSERT INTO {self.name} ({self.column_list}) VALUES ({marks})"
        return f"{insert} ON CONFLICT ({names[0]}) DO UPDATE SET {changes}"

    def encoded(self, record: Any) -> tuple[Any, Row]:
        """A record as a reader of its row gets it, and the row."""
        plain = [getattr(record, name) for name in self.columns]
        row = (*plain, *[_json_of(getattr(record, name), f"{self.name}.{name}") for name in self.json_columns])
        if self.model is Worker:  # the hot path; its claims are the store's own note
            stats = record.heartbeat_stats
            return record if stats is None else replaced(record, heartbeat_stats=orjson.loads(row[-2])), row
        return self.record_of(row), row

    def record_of(self, row: Row) -> Any:
        plain = dict(zip(self.columns, row, strict=False))
        bodies = zip(self.json_columns, row[len(self.columns) :], strict=True)
        return self.model(**plain, **{name: orjson.loads(body) for name, body in bodies})


def _json_of(value: object, where: str) -> bytes:
    if where == _CLAIMS:  # the store's own note, many of which are short
        return orjson.dumps(value)
    if isinstance(value, dict):
        value = {name: item.model_dump() if hasattr(item, "model_dump") else item for name, item in value.items()}
    return as_json(value, where)


def _record_table(name: str, model: type[Any], *json_columns: str) -> RecordTable:
    key = RECORD_KEYS[model]
    columns = [field for field in model.model_fields if field != key and field not in json_columns]
    return RecordTable(name, (key, *columns), json_columns, model)


RECORD_TABLES: dict[type, RecordTable] = {
    ResourcesUpdate: _record_table("resources", ResourcesUpdate, "resources"),
    Worker: _record_table("workers", Worker, "heartbeat_stats", "claims"),
    Run: _record_table("runs", Run, "config", "metadata", "summary"),
    Setting: RecordTable("settings", ("name", "value"), (), Setting),
}


def rollout_json(rollout: Rollout) -> Row:
    output = None if rollout.output is None else as_json(rollout.output, "output")
    return as_json(rollout.config.model_dump(), "config"), as_json(rollout.metadata, "metadata"), output


def rollout_as_read(rollout: Rollout, json: Row) -> Rollout:
    """The rollout as a reader of its row gets it."""
    _, metadata, output = json
    return replaced(rollout, metadata=orjson.loads(metadata), output=output and orjson.loads(output))
