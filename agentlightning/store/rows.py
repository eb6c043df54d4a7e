"""Rows: how rollouts, attempts and the keyed records lie in their tables, in SQLite and in PostgreSQL alike."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson

from agentlightning.store.claims import Grant
from agentlightning.store.values import as_json, replaced
from agentlightning.types import Attempt, ResourcesUpdate, Rollout, RolloutConfig, Run, Worker

__all__ = [
    "ATTEMPT_COLUMNS",
    "RECORD_TABLES",
    "ROLLOUT_COLUMNS",
    "SELECT_ATTEMPTS",
    "Json",
    "RecordTable",
    "RolloutEntry",
    "Row",
    "attempt_of",
    "attempt_row",
    "migrations",
    "rollout_as_read",
    "rollout_json",
    "rollout_of",
]

Row = tuple[Any, ...]

ROLLOUT_COLUMNS = "rollout_id, status, mode, resources_id, start_time, end_time, config, metadata, output"
ATTEMPT_COLUMNS = (
    "rollout, sequence_id, attempt_id, status, start_time, end_time, worker_id, last_heartbeat_time, heartbeat_span, "
    "metadata"
)
SELECT_ATTEMPTS = """
SELECT rollout, sequence_id, attempt_id, status, start_time, end_time, worker_id,
       coalesce((SELECT arrival_time FROM spans
                 WHERE spans.rollout = attempts.rollout AND spans.attempt = attempts.sequence_id
                   AND spans.number > heartbeat_span ORDER BY spans.number DESC LIMIT 1), last_heartbeat_time),
       metadata
FROM attempts
"""


def migrations() -> list[str]:
    """The scripts that make the tables, in the order of their numbers, in SQLite's dialect."""
    folder = resources.files("agentlightning.store") / "migrations"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return [file.read_text(encoding="utf-8") for file in files]


def rollout_of(row: Row, body: bytes) -> Rollout:
    """A rollout from its columns and its input."""
    rollout_id, status, mode, resources_id, start_time, end_time, config, metadata, output = row
    return Rollout(
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
    )


@functools.lru_cache(256)
def _config_of(body: bytes) -> RolloutConfig:
    """Most rollouts share their configuration, which is never changed in place."""
    return RolloutConfig.model_validate_json(body)


Json = tuple[bytes, bytes, bytes | None]
"""Configuration, metadata and output of a rollout."""


def rollout_json(rollout: Rollout) -> Json:
    output = None if rollout.output is None else as_json(rollout.output, "output")
    return as_json(rollout.config.model_dump(), "config"), as_json(rollout.metadata, "metadata"), output


def rollout_as_read(rollout: Rollout, json: Json) -> Rollout:
    """The rollout as a reader of its row gets it."""
    _, metadata, output = json
    if output is None:
        return replaced(rollout, metadata=orjson.loads(metadata))
    return replaced(rollout, metadata=orjson.loads(metadata), output=orjson.loads(output))


class RolloutEntry:
    """A rollout as a transaction knows it."""

    __slots__ = ("due", "json", "number", "rollout", "span_ids")

    def __init__(self, rollout: Rollout, number: int, json: Json, due: float | None = None) -> None:
        self.rollout = rollout
        self.number = number
        self.json = json
        self.due = due
        self.span_ids: dict[int, set[str]] = {}
        """Of attempts, the ids of spans that they are known to have."""

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


def attempt_of(row: Row, rollout_id: str) -> Attempt:
    _, sequence_id, attempt_id, status, start_time, end_time, worker_id, last_heartbeat_time, metadata = row
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
    )


def attempt_row(attempt: Attempt, rollout_number: int, last_span: int) -> Row:
    """An attempt whose heartbeat is later than that of any span up to `last_span`."""
    return (
        rollout_number,
        attempt.sequence_id,
        attempt.attempt_id,
        attempt.status,
        attempt.start_time,
        attempt.end_time,
        attempt.worker_id,
        attempt.last_heartbeat_time,
        last_span,
        as_json(attempt.metadata, "metadata"),
    )


@dataclass(frozen=True)
class RecordTable:
    """A table of records under one key: plain columns first, JSON columns behind them."""

    name: str
    columns: tuple[str, ...]
    """The key first."""
    json_columns: tuple[str, ...]
    model: Callable[..., Any]

    @property
    def key(self) -> str:
        return self.columns[0]

    @property
    def column_list(self) -> str:
        return ", ".join((*self.columns, *self.json_columns))

    @property
    def upsert(self) -> str:
        names = (*self.columns, *self.json_columns)
        changes = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        marks = ", ".join("?" * len(names))
        return (
            f"INSERT INTO {self.name} ({self.column_list}) VALUES ({marks}) "
            f"ON CONFLICT ({self.key}) DO UPDATE SET {changes}"
        )

    def row_of(self, record: Any) -> Row:
        plain = [getattr(record, name) for name in self.columns]
        return (*plain, *(_json_of(getattr(record, name), f"{self.name}.{name}") for name in self.json_columns))

    def record_of(self, row: Row) -> Any:
        plain = dict(zip(self.columns, row, strict=False))
        bodies = zip(self.json_columns, row[len(self.columns) :], strict=True)
        return self.model(**plain, **{name: orjson.loads(body) for name, body in bodies})


def _json_of(value: Any, where: str) -> bytes:
    if isinstance(value, dict):
        value = {name: item.model_dump() if hasattr(item, "model_dump") else item for name, item in value.items()}
    return as_json(value, where)


def _record_table(name: str, model: type[Any], key: str, json_columns: tuple[str, ...]) -> RecordTable:
    columns = [field for field in model.model_fields if field != key and field not in json_columns]
    return RecordTable(name, (key, *columns), json_columns, model)


RECORD_TABLES: dict[type, RecordTable] = {
    ResourcesUpdate: _record_table("resources", ResourcesUpdate, "resources_id", ("resources",)),
    Worker: _record_table("workers", Worker, "worker_id", ("heartbeat_stats",)),
    Run: _record_table("runs", Run, "run_id", ("config", "metadata", "summary")),
    Grant: _record_table("grants", Grant, "grant_id", ("given",)),
}
