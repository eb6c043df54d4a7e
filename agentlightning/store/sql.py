"""What the back ends that speak SQL have in common: selections, and the reads that are the same in every dialect.

A selection must answer as `agentlightning.store.selection.choose` does over objects.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import orjson

from agentlightning.store.notices import NoticeFields
from agentlightning.store.rows import RECORD_TABLES, Row
from agentlightning.store.selection import Condition, Selection, choose
from agentlightning.store.transaction import RecordT
from agentlightning.types import Attempt, MetricPoint, PaginatedResult, Span

__all__ = [
    "SELECT_NOTICES",
    "Clauses",
    "SqlSession",
    "clauses_of",
    "notices_of",
    "select_metrics",
    "select_open_spans",
    "select_page",
    "select_records",
    "select_spans",
]

SELECT_NOTICES = "SELECT body FROM notices WHERE last_cursor > ? ORDER BY last_cursor"
_ALL = 2**63 - 1
_OF_ROLLOUT = "rollout = (SELECT number FROM rollouts WHERE rollout_id = ?)"


class SqlSession(Protocol):
    """A transaction in progress, in a dialect."""

    orders: ClassVar[Mapping[str, str]]
    """How to sort `asc` and `desc`, with what is missing before everything else."""

    def select(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]: ...

    def term(self, condition: Condition, parameters: list[Any]) -> str:
        """A condition, whose parameters are appended; its field is known to exist, so it is safe to write out."""
        ...


class Clauses(NamedTuple):
    """The end of a SELECT, and its parameters."""

    where: str
    parameters: list[Any]
    order: str
    page: str
    page_parameters: list[int]


def clauses_of(session: SqlSession, selection: Selection) -> Clauses:
    """WHERE, ORDER BY and LIMIT of a selection; records that sort alike come in the order of their numbers."""
    parameters: list[Any] = []
    joint = " OR " if selection.logic == "or" else " AND "
    groups = [" AND ".join([session.term(condition, parameters) for condition in selection.must])]
    groups.append(joint.join([session.term(condition, parameters) for condition in selection.conditions]))
    terms = [f"({group})" for group in groups if group]
    where = f" WHERE {' AND '.join(terms)}" if terms else ""
    order = " ORDER BY number"
    if selection.sort_by is not None:
        order = f" ORDER BY {selection.sort_by} {session.orders[selection.sort_order]}, number"
    limit = selection.limit if selection.limit >= 0 else _ALL
    return Clauses(where, parameters, order, " LIMIT ? OFFSET ?", [limit, selection.offset])


def select_page(session: SqlSession, columns: str, table: str, selection: Selection) -> tuple[list[Row], int]:
    """The rows of a page, and how many there are on all pages."""
    clauses = clauses_of(session, selection)
    return _page(session, columns, f"{table}{clauses.where}", clauses, clauses.parameters, selection)


def _page(
    session: SqlSession, columns: str, source: str, clauses: Clauses, parameters: list[Any], selection: Selection
) -> tuple[list[Row], int]:
    page = f"SELECT {columns} FROM {source}{clauses.order}{clauses.page}"
    rows = session.select(page, [*parameters, *clauses.page_parameters])
    total = len(rows) + selection.offset
    if selection.limit >= 0 or (selection.offset and not rows):
        total = session.select(f"SELECT count(*) FROM {source}", parameters)[0][0]
    return rows, total


def select_records(session: SqlSession, kind: type[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
    table = RECORD_TABLES[kind]
    rows, total = select_page(session, table.column_list, table.name, selection)
    items = [table.record_of(row) for row in rows]
    return PaginatedResult.model_construct(items=items, limit=selection.limit, offset=selection.offset, total=total)


def select_spans(
    session: SqlSession, rollout_id: str, attempt: Attempt | None, selection: Selection
) -> PaginatedResult[Span]:
    """Spans of a rollout, or of one attempt; what is not a column is looked for in their bodies."""
    source, parameters = f"spans WHERE {_OF_ROLLOUT}", [rollout_id, *([] if attempt is None else [attempt.sequence_id])]
    if attempt is not None:
        source += " AND attempt = ?"
    if selection.conditions or selection.sort_by not in (None, "sequence_id"):
        rows = session.select(f"SELECT body FROM {source} ORDER BY number", parameters)
        return choose([Span.model_validate_json(body) for (body,) in rows], selection)
    rows, total = _page(session, "body", source, clauses_of(session, selection), parameters, selection)
    items = [Span.model_validate_json(body) for (body,) in rows]
    return PaginatedResult.model_construct(items=items, limit=selection.limit, offset=selection.offset, total=total)


def select_open_spans(session: SqlSession, rollout_id: str) -> list[Span]:
    rows = session.select(f"SELECT body FROM open_spans WHERE {_OF_ROLLOUT}", (rollout_id,))
    return [Span.model_validate(fields) for (body,) in rows for fields in orjson.loads(body)]


def select_metrics(session: SqlSession, run_id: str, step: int | None = None) -> list[MetricPoint]:
    """The points of a run, or of one step of it."""
    of_step, parameters = ("", [run_id]) if step is None else (" AND step = ?", [run_id, step])
    sql = f"SELECT step, time, body FROM metrics WHERE run_id = ?{of_step} ORDER BY step, number"
    rows = session.select(sql, parameters)
    return [MetricPoint(run_id=run_id, step=step, time=time, values=orjson.loads(body)) for step, time, body in rows]


def notices_of(rows: Iterable[Row], after: int) -> list[NoticeFields]:
    """The notices behind a cursor, from the rows of `SELECT_NOTICES`."""
    notices = [tuple(fields) for (body,) in rows for fields in orjson.loads(body)]
    return [fields for fields in notices if fields[1] > after]
