"""Selections as SQL. Must answer as `agentlightning.store.selection.choose` does over objects."""

from typing import Any, NamedTuple

import orjson

from agentlightning.store.selection import Condition, Selection

__all__ = ["Clauses", "clauses_of"]


class Clauses(NamedTuple):
    """The end of a SELECT, and its parameters."""

    where: str
    order: str
    page: str
    parameters: list[Any]


def clauses_of(selection: Selection, tiebreak: str = "number") -> Clauses:
    """WHERE, ORDER BY and LIMIT of a selection; records that sort alike come in the order of `tiebreak`."""
    parameters: list[Any] = []
    groups = [_group(selection.must, " AND ", parameters)]
    groups.append(_group(selection.conditions, " OR " if selection.logic == "or" else " AND ", parameters))
    terms = [f"({group})" for group in groups if group]
    where = f" WHERE {' AND '.join(terms)}" if terms else ""
    order = f" ORDER BY {tiebreak}"
    if selection.sort_by is not None:
        order = f" ORDER BY {selection.sort_by} {selection.sort_order.upper()}, {tiebreak}"
    page = f" LIMIT {int(selection.limit)} OFFSET {int(selection.offset)}"
    return Clauses(where, order, page, parameters)


def _group(conditions: tuple[Condition, ...], joint: str, parameters: list[Any]) -> str:
    return joint.join(_term(condition, parameters) for condition in conditions)


def _term(condition: Condition, parameters: list[Any]) -> str:
    """One condition; the field was checked against the fields of the record, so it is safe to write out."""
    if condition.kind == "within":
        parameters.append(orjson.dumps(sorted(condition.value, key=str)))
        return f"{condition.field} IN (SELECT value FROM json_each(?))"
    parameters.append(condition.value)
    if condition.kind == "contains":
        return f"instr({condition.field}, ?) > 0"
    return f"{condition.field} IS ?"
