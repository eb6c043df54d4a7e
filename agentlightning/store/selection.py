"""Selections: filter, sort and page, as one value that every back end understands; and what rollouts are found by.

`Selection.of` reads the arguments of a query; `choose` answers a selection over Python objects. A back end with an
index of its own translates the same value instead and must give the same answer.

Besides their own fields, rollouts are filtered and sorted by run, step, group, agent, error, and their task. The first
four stand in what an algorithm sends with a rollout, its metadata and its task; the error is noted on its latest
attempt. SQL keeps them in a table of their own, memory reads them when it is asked.
"""

import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson

from agentlightning.errors import InvalidQuery
from agentlightning.types import Attempt, FilterLogic, PaginatedResult, Rollout, SortOrder
from agentlightning.types.core import TASK_ROW

LARGEST_NUMBER = 2**63 - 1
PAGING = frozenset(["filter_logic", "sort_by", "sort_order", "limit", "offset"])
"""Arguments of a query that are no filters."""

FEW = 8
"""Of so many times as many records, a page is picked instead of sorting them all."""

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class Condition:
    """One field against one demand: `exact`, `within`, `contains`, `min` or `max`."""

    field: str
    kind: str
    value: Any

    @classmethod
    def of(cls, name: str, value: Any) -> "Condition":
        """What an argument of a query stands for: `status_in` and `name_contains` say how to compare."""
        if name.endswith("_in"):
            if isinstance(value, str):
                raise InvalidQuery(f"Expected a list of values to filter by, not the text '{value}'.")
            if any(isinstance(one, int) and not -LARGEST_NUMBER <= one <= LARGEST_NUMBER for one in value):
                raise InvalidQuery(f"'{name}' has a number of more than 63 bits, which no record has.")
            return cls(name.removesuffix("_in"), "within", frozenset(value))
        if name.endswith("_contains"):
            if not isinstance(value, str):
                raise InvalidQuery(f"Expected a text to look for, not {value!r}.")
            return cls(name.removesuffix("_contains"), "contains", value)
        for kind in ("min", "max"):
            if name.endswith(f"_{kind}"):
                if not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise InvalidQuery(f"Expected a number for '{name}', not {value!r}.")
                return cls(name.removesuffix(f"_{kind}"), kind, float(value))
        return cls(name, "exact", value)

    def test(self) -> Callable[[Any], bool]:
        """Says of a value of the field whether it is what is demanded; a missing one is neither small nor large.

        A query calls it once for each record, so it decides nothing that it need not.
        """
        wanted = self.value
        if self.kind == "within":
            return frozenset(wanted).__contains__
        if self.kind == "contains":
            return lambda actual: isinstance(actual, str) and wanted in actual
        if self.kind == "min":
            return lambda actual: actual is not None and actual >= wanted
        if self.kind == "max":
            return lambda actual: actual is not None and actual <= wanted
        return lambda actual: bool(actual == wanted)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records, in which order, which page of them."""

    conditions: tuple[Condition, ...] = ()
    filter_logic: FilterLogic = "and"
    sort_by: str | None = None
    sort_order: SortOrder = "asc"
    limit: int = -1
    offset: int = 0

    @classmethod
    def of(cls, arguments: Mapping[str, Any], fields: Collection[str]) -> "Selection":
        """What a query asks for, if every field it names exists and the page makes sense; None does not filter."""
        paging = {name: value for name, value in arguments.items() if name in PAGING}
        filters = [(name, value) for name, value in arguments.items() if name not in PAGING and value is not None]
        filters.sort(key=lambda named: named[0].startswith("run_id"))  # the last: nearly all may be of one run
        selection = cls(tuple([Condition.of(name, value) for name, value in filters]), **paging)
        named = [condition.field for condition in selection.conditions]
        for name in [*named, *([] if selection.sort_by is None else [selection.sort_by])]:
            if name not in fields:
                raise InvalidQuery(f"There is no field '{name}' to filter or sort by; use one of {sorted(fields)}.")
        if selection.filter_logic not in ("and", "or"):
            raise InvalidQuery(f"filter_logic is '{selection.filter_logic}'; use 'and' or 'or'.")
        if selection.sort_order not in ("asc", "desc"):
            raise InvalidQuery(f"sort_order is '{selection.sort_order}'; use 'asc' or 'desc'.")
        if not -1 <= selection.limit <= LARGEST_NUMBER or not 0 <= selection.offset <= LARGEST_NUMBER:
            raise InvalidQuery(
                f"limit {selection.limit} and offset {selection.offset}: use a limit from -1 (all), an offset from 0, "
                "and numbers of at most 63 bits."
            )
        return selection

    def page(self, items: list[RecordT], total: int) -> PaginatedResult[RecordT]:
        """The page with these items, of so many on all pages."""
        return PaginatedResult.model_construct(items=items, limit=self.limit, offset=self.offset, total=total)


def choose(
    records: Iterable[RecordT],
    selection: Selection,
    reader: Callable[[str], Callable[[RecordT], Any]] = operator.attrgetter,
) -> PaginatedResult[RecordT]:
    """The records a selection asks for; without a sort key they keep their order.

    Args:
        reader: Makes what reads a field of these records.
    """
    chosen = list(records)
    name = selection.sort_by
    if selection.filter_logic == "and":
        for one in selection.conditions:  # in C, but for the test
            chosen = list(itertools.compress(chosen, map(one.test(), map(reader(one.field), chosen))))
    elif selection.conditions:
        tests = [(one.test(), reader(one.field)) for one in selection.conditions]
        chosen = [record for record in chosen if any(holds(read(record)) for holds, read in tests)]
    if name is not None:
        values = list(map(reader(name), chosen))
        keys: list[Any] = values
        if None in values and name.endswith("_time"):  # what has not happened yet comes after what has
            keys = [math.inf if value is None else value for value in values]
        elif None in values:  # other values that are missing come first
            keys = [(value is not None, value) for value in values]
        order = range(len(keys))
        end = selection.offset + selection.limit
        if selection.limit >= 0 and end * FEW < len(keys):  # of many, the first few
            first = heapq.nlargest if selection.sort_order == "desc" else heapq.nsmallest
            places = first(end, order, key=keys.__getitem__)
            return selection.page([chosen[place] for place in places[selection.offset :]], len(keys))
        places = sorted(order, key=keys.__getitem__, reverse=selection.sort_order == "desc")
        chosen = [chosen[place] for place in places]
    return page_of(chosen, selection)


def page_of(chosen: Sequence[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
    """Cut the page out of everything that was chosen."""
    end = None if selection.limit < 0 else selection.offset + selection.limit
    return selection.page(list(chosen[selection.offset : end]), len(chosen))


# ---------------------------------------------------------------------- what rollouts are found by

ENDED_BADLY: Final = ("failed", "timeout", "unresponsive")
"""Statuses of an attempt that are errors themselves."""


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


def searched_text(text: str) -> str:
    """A text as it stands in the JSON of a task."""
    return orjson.dumps(text.encode(errors="replace").decode())[1:-1].decode()
