"""What rollouts are filtered and sorted by besides their own fields: run, step, group, agent, error, and their task.

The first four stand in what an algorithm sends with a rollout, its metadata and its task; the error is noted on its
latest attempt. SQL keeps them in a table of their own, memory in lists that queries make.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import orjson

from agentlightning.types import Attempt, Rollout
from agentlightning.types.core import TASK_ROW

RecordT = TypeVar("RecordT")
ENDED_BADLY: Final = ("failed", "timeout", "unresponsive")
"""Statuses of an attempt that are errors themselves."""

MOST_CHANGES: Final = 100_000
"""That are noted between two queries; after more, reading all records is not dearer."""


def failure_text(attempt: Attempt | None) -> str | None:
    """The error that an attempt noted, in one line; None if it noted none."""
    noted = None if attempt is None else (attempt.metadata or {}).get("error")
    if not isinstance(noted, Mapping) or not noted.get("type"):
        return None
    first_line = str(noted.get("message") or "").partition("\n")[0]
    return f"{noted['type']}: {first_line}" if first_line else str(noted["type"])


def _text_in_metadata(name: str, rollout: Rollout) -> str | None:
    value = (rollout.metadata or {}).get(name)
    return value if isinstance(value, str) else None


def run_id_of(rollout: Rollout) -> str | None:
    """The run that a rollout names as its own."""
    return _text_in_metadata("run_id", rollout)


def _step_of(rollout: Rollout) -> int | None:
    step = (rollout.metadata or {}).get("step")
    return step if type(step) is int and abs(step) < 2**63 else None


def _agent_of(rollout: Rollout) -> str | None:
    """The agent that a task names, in itself or in the metadata of a `Task`."""
    task = rollout.input
    agent = task.get("agent") if isinstance(task, dict) else None
    if agent is None and isinstance(row := (rollout.metadata or {}).get(TASK_ROW), Mapping):
        agent = metadata.get("agent") if isinstance(metadata := row.get("metadata"), Mapping) else None
    return agent if isinstance(agent, str) else None


def _error_of(attempt: Attempt | None) -> str | None:
    noted = failure_text(attempt)
    return attempt.status if noted is None and attempt is not None and attempt.status in ENDED_BADLY else noted


_READERS: Final[Mapping[str, Callable[[Rollout], Any]]] = {
    "reward": operator.attrgetter("reward"),
    "run_id": run_id_of,
    "step": _step_of,
    "group_id": functools.partial(_text_in_metadata, "group"),
    "agent": _agent_of,
    "input": lambda rollout: orjson.dumps(rollout.input, default=str, option=orjson.OPT_NON_STR_KEYS).decode(),
}
INDEX_COLUMNS: Final = ("reward", "run_id", "step", "group_id", "agent", "error")
ROLLOUT_FIELDS: Final = (frozenset(Rollout.model_fields) - {"config", "metadata", "output"}) | set(INDEX_COLUMNS)
"""Fields a query may filter and sort by; `input` only as a text that contains another."""


def index_values(rollout: Rollout, attempt: Attempt | None) -> list[Any]:
    """What a rollout is found by, in the order of `INDEX_COLUMNS`.

    Args:
        attempt: Its latest.
    """
    return [_error_of(attempt) if name == "error" else _READERS[name](rollout) for name in INDEX_COLUMNS]


def index_reader(
    field: str, rollout_of: Callable[[RecordT], Rollout], attempt_of: Callable[[RecordT], Attempt | None]
) -> Callable[[RecordT], Any]:
    """Makes what reads a field that a query names, of the rollout itself or of its index.

    Args:
        rollout_of: The rollout of a record.
        attempt_of: Its latest attempt.
    """
    if field == "error":
        return lambda record: _error_of(attempt_of(record))
    read = _READERS.get(field) or operator.attrgetter(field)
    return lambda record: read(rollout_of(record))


class Columns(Generic[RecordT]):
    """Fields of numbered records, a list for each, so that a query need not read every record.

    A list is made when a query first names its field, and brought up to date by the next one that does.
    """

    def __init__(self, reader: Callable[[str], Callable[[RecordT], Any]]) -> None:
        self._reader = reader
        self._columns: dict[str, tuple[list[Any], int]] = {}
        """With how many of the changes each has seen."""
        self._changes: list[int] = []

    def note(self, number: int) -> None:
        """A record has changed."""
        if self._columns:
            self._changes.append(number)
            if len(self._changes) > MOST_CHANGES:
                self.forget()

    def forget(self) -> None:
        self._columns.clear()
        self._changes.clear()

    def values(self, field: str, records: Sequence[RecordT]) -> list[Any]:
        """The field of all records, by their numbers."""
        read = self._reader(field)
        column, seen = self._columns.get(field, ([], 0))
        for number in set(self._changes[seen:]):
            if number < len(column):
                column[number] = read(records[number])
        column.extend(map(read, records[len(column) :]))
        self._columns[field] = column, len(self._changes)
        return column


def searched_text(text: str) -> str:
    """A text as it stands in the JSON of a task."""
    return orjson.dumps(text.encode(errors="replace").decode())[1:-1].decode()
