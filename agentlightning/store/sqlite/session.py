"""One connection's transaction in progress: the connection, what is held back, and how to undo it."""

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import orjson

from agentlightning.store.rows import Row
from agentlightning.store.selection import Condition

__all__ = ["Session"]


class Session:
    """What the tables of a transaction share."""

    orders: ClassVar[Mapping[str, str]] = {"asc": "ASC", "desc": "DESC"}

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.is_holding_back = False
        """Whether some table holds rows that are not in the database yet."""
        self.is_spoiled = False
        """Whether rows of the operation in progress are in the database, so that undoing it here is not enough."""
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._flushes: list[Callable[[], None]] = []

    def flush_with(self, flush: Callable[[], None]) -> None:
        """Have a table write its rows whenever the session is flushed."""
        self._flushes.append(flush)

    def hold_back(self, undo: Callable[..., Any], *arguments: Any) -> None:
        """Note a write, with the call that takes it back."""
        self._undo.append((undo, arguments))
        self.is_holding_back = True

    def flush(self) -> None:
        """Write all rows held back; the transaction stays open."""
        if not self.is_holding_back:
            return
        if self._undo:
            self.is_spoiled = True
            self._undo.clear()
        for flush in self._flushes:
            flush()
        self.is_holding_back = False

    def select(self, sql: str, parameters: Iterable[Any] = ()) -> list[Row]:
        """Rows as the transaction sees them, its own writes included."""
        if self.is_holding_back:
            self.flush()
        return self.select_stored(sql, parameters)

    def select_stored(self, sql: str, parameters: Iterable[Any] = ()) -> list[Row]:
        """Rows as they are in the database; for what is known not to be held back."""
        return self.connection.execute(sql, tuple(parameters)).fetchall()

    def term(self, condition: Condition, parameters: list[Any]) -> str:
        if condition.kind == "within":
            parameters.append(orjson.dumps(sorted(condition.value, key=str)))
            return f"{condition.field} IN (SELECT value FROM json_each(?))"
        parameters.append(condition.value)
        return f"instr({condition.field}, ?) > 0" if condition.kind == "contains" else f"{condition.field} IS ?"

    def write(self, sql: str, rows: Iterable[Row]) -> None:
        """Run a statement for every row; for the flushes."""
        self.connection.executemany(sql, rows)

    def keep(self) -> None:
        """The operation is done; what it wrote stays."""
        self._undo.clear()
        self.is_spoiled = False

    def take_back(self) -> None:
        """The operation failed; what it wrote goes, the last write first."""
        while self._undo:
            undo, arguments = self._undo.pop()
            undo(*arguments)

    def forget(self) -> None:
        """The transaction was rolled back: nothing is held back and nothing is to be undone."""
        self._undo.clear()
        self.is_spoiled = self.is_holding_back = False
