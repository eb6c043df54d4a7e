"""Selections: filter, sort and page, as one value that every back end understands.

`Selection` is what a query asks for; `choose` answers it over Python objects. A back end with an index of its own
translates the same value instead and must give the same answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agentlightning.errors import InvalidQuery
from agentlightning.types import FilterLogic, PaginatedResult, SortOrder

__all__ = ["Condition", "Selection", "choose", "conditions", "page_of"]

LARGEST_NUMBER = 2**63 - 1

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class Condition:
    """One field against one demand: `exact`, `within` or `contains`."""

    field: str
    kind: str
    value: Any

    def holds(self, record: object) -> bool:
        actual = getattr(record, self.field)
        if self.kind == "exact":
            return bool(actual == self.value)
        if self.kind == "within":
            return actual in self.value
        return isinstance(actual, str) and self.value in actual


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records, in which order, which page of them."""

    conditions: tuple[Condition, ...] = ()
    logic: FilterLogic = "and"
    must: tuple[Condition, ...] = ()
    """Conditions that apply whatever `logic` says."""
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0

    def checked(self, fields: Iterable[str]) -> "Selection":
        """Itself, if every field it names exists and the page makes sense."""
        known = set(fields)
        named = [condition.field for condition in (*self.conditions, *self.must)]
        for name in [*named, *([] if self.sort_by is None else [self.sort_by])]:
            if name not in known:
                raise InvalidQuery(f"There is no field '{name}' to filter or sort by; use one of {sorted(known)}.")
        if self.logic not in ("and", "or"):
            raise InvalidQuery(f"filter_logic is '{self.logic}'; use 'and' or 'or'.")
        if self.sort_order not in ("asc", "desc"):
            raise InvalidQuery(f"sort_order is '{self.sort_order}'; use 'asc' or 'desc'.")
        if not -1 <= self.limit <= LARGEST_NUMBER or not 0 <= self.offset <= LARGEST_NUMBER:
            raise InvalidQuery(
                f"limit {self.limit} and offset {self.offset}: use a limit from -1 (all), an offset from 0, "
                "and numbers of at most 63 bits."
            )
        return self


def conditions(filters: Mapping[str, Mapping[str, Any]]) -> tuple[Condition, ...]:
    """Conditions from `{"status": {"within": [...]}}`; a demand of None does not filter."""
    return tuple(
        Condition(field, kind, _comparable(kind, value))
        for field, demands in filters.items()
        for kind, value in demands.items()
        if value is not None
    )


def _comparable(kind: str, value: Any) -> Any:
    if kind == "contains" and not isinstance(value, str):
        raise InvalidQuery(f"Expected a text to look for, not {value!r}.")
    if kind != "within":
        return value
    if isinstance(value, str):
        raise InvalidQuery(f"Expected a list of values to filter by, not the text '{value}'.")
    return frozenset(value)


def choose(records: Iterable[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
    """The records a selection asks for; without a sort key they keep their order."""
    matches = _matcher(selection)
    chosen = list(records) if matches is None else [record for record in records if matches(record)]
    if selection.sort_by is not None:
        name = selection.sort_by
        chosen.sort(key=lambda record: _sort_key(getattr(record, name)), reverse=selection.sort_order == "desc")
    return page_of(chosen, selection)


def page_of(chosen: Sequence[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
    """Cut the page out of everything that was chosen."""
    end = None if selection.limit < 0 else selection.offset + selection.limit
    return PaginatedResult.model_construct(
        items=list(chosen[selection.offset : end]),
        limit=selection.limit,
        offset=selection.offset,
        total=len(chosen),
    )


def _matcher(selection: Selection) -> Callable[[object], bool] | None:
    if not selection.conditions and not selection.must:
        return None
    combine = any if selection.logic == "or" and selection.conditions else all

    def matches(record: object) -> bool:
        return all(condition.holds(record) for condition in selection.must) and combine(
            condition.holds(record) for condition in selection.conditions
        )

    return matches


def _sort_key(value: Any) -> tuple[bool, Any]:
    """Missing values first."""
    return (value is not None, value)
