"""One connection's transaction in progress: statements are sent in a pipeline, and rows are held back until needed.

Also selections as SQL, which must answer as `agentlightning.store.selection.choose` does over objects.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from psycopg import Cursor

from agentlightning.store.postgres.database import Connection
from agentlightning.store.selection import Condition, Selection

__all__ = ["SelectClauses", "Row", "PostgresSession", "clauses_of", "is_storable"]

Row = tuple[Any, ...]


class PostgresSession:
    """What the tables of a transaction share; used inside `connection.pipeline()`."""

    def __init__(self, connection: Connection, *, is_reader: bool) -> None:
        self.is_reader = is_reader
        self._connection = connection
        self._flushes: list[Callable[[], None]] = []
        begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY" if is_reader else "BEGIN"
        connection.execute(begin)

    def flush_with(self, flush: Callable[[], None]) -> None:
        """Have a table send its rows whenever the session is flushed."""
        self._flushes.append(flush)

    def flush(self) -> None:
        """Send all rows held back, without waiting; the transaction stays open."""
        for flush in self._flushes:
            flush()

    def send(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor[Row]:
        """Send a statement without waiting; its rows may be fetched later."""
        return self._connection.cursor(binary=True).execute(sql, parameters)

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Rows as the transaction sees them, its own writes included."""
        if not self.is_reader:
            self.flush()
        return self.send(sql, parameters).fetchall()


class SelectClauses(NamedTuple):
    """The end of a SELECT, and its parameters."""

    where: str
    order: str
    page: str
    parameters: list[Any]


def clauses_of(selection: Selection) -> SelectClauses:
    """WHERE, ORDER BY and LIMIT of a selection; records that sort alike come in the order of their numbers."""
    parameters: list[Any] = []
    groups = [_group(selection.must, " AND ", parameters)]
    groups.append(_group(selection.conditions, " OR " if selection.logic == "or" else " AND ", parameters))
    terms = [f"({group})" for group in groups if group]
    where = f" WHERE {' AND '.join(terms)}" if terms else ""
    order = " ORDER BY number"
    if selection.sort_by is not None:
        nulls = "ASC NULLS FIRST" if selection.sort_order == "asc" else "DESC NULLS LAST"
        order = f" ORDER BY {selection.sort_by} {nulls}, number"
    limit = "ALL" if selection.limit < 0 else int(selection.limit)
    return SelectClauses(where, order, f" LIMIT {limit} OFFSET {int(selection.offset)}", parameters)


def _group(conditions: tuple[Condition, ...], joint: str, parameters: list[Any]) -> str:
    return joint.join(_term(condition, parameters) for condition in conditions)


def _term(condition: Condition, parameters: list[Any]) -> str:
    """One condition; the field was checked against the fields of the record, so it is safe to write out."""
    if condition.kind == "within":
        parameters.append(sorted(filter(is_storable, condition.value)))
        return f"{condition.field} = ANY(%b::text[])"
    if not is_storable(condition.value):
        return "FALSE"  # no row has it
    parameters.append(condition.value)
    return f"strpos({condition.field}, %b) > 0" if condition.kind == "contains" else f"{condition.field} = %b"


def is_storable(value: Any) -> bool:
    """Whether a column of texts can hold it."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
