"""A working set on a database: what the back ends that speak SQL have in common.

It loads what it meets and holds changed rows back until they are flushed, so that the ten spans of a rollout read it
once and, arriving in one batch, write its attempt once. What JSON cannot hold is refused when it is put, never when it
is flushed. A dialect gives the statements that write, numbers for new rollouts, and whether an attempt has a span.
"""

import itertools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import orjson

from agentlightning.store.copies import replaced
from agentlightning.store.lifecycle import is_finished
from agentlightning.store.rollout_index import ENDED_BADLY, INDEX_COLUMNS, index_values
from agentlightning.store.selection import Condition, Selection, choose
from agentlightning.store.tables import (
    READ_ROLLOUTS,
    RECORD_TABLES,
    ROLLOUT_WIDTH,
    Row,
    SqlEntry,
    attempt_of,
    attempt_row,
    entry_of,
    rollout_as_read,
    rollout_json,
)
from agentlightning.store.transaction import KeyedT, OpenSpans, SelectedT, StoreLimits
from agentlightning.store.values import as_json, check_json_size, span_as_json, span_of_json
from agentlightning.store.working_set import WorkingSet
from agentlightning.types import Attempt, MetricPoint, PaginatedResult, Rollout, Span

MOST_ENTRIES = 2048
"""How many rollouts, and records of a kind, a transaction remembers; with more it begins anew."""
_LAST_SEQUENCE = """
SELECT max(last) FROM (SELECT last FROM sequences WHERE rollout_id = ?
                       UNION ALL SELECT max(sequence_id) FROM spans WHERE rollout = ?) AS numbers
"""
_OF_ROLLOUT = "rollout = (SELECT number FROM rollouts WHERE rollout_id = ?)"
_QUEUED = "SELECT rollout_id FROM queue JOIN rollouts ON number = rollout ORDER BY position"
_ALL = 2**63 - 1


class SqlTransaction(WorkingSet[SqlEntry]):
    """A working set on a database."""

    orders: ClassVar[Mapping[str, str]]
    """How to sort `asc` and `desc`, with what is missing before everything else; of times, after it."""
    terms: ClassVar[Mapping[str, str]]
    """How a field is compared, by the kind of the condition; `input` is looked for in the bytes of a body."""
    span_counts: ClassVar[str]
    """The number of all spans and their bytes, as two columns."""

    def __init__(self, limits: StoreLimits) -> None:
        self.is_spoiled = False
        """Whether rows of the operation in progress are in the database, so that undoing it here is not enough."""
        self.earliest_due: float | None = None
        """No rollout is due before this moment, as far as was seen here; None if none is scheduled."""
        self._places = itertools.count()
        super().__init__(limits)

    def _remember_nothing(self) -> None:
        super()._remember_nothing()
        self._absent: set[str] = set()  # ids of rollouts that were looked for in vain
        self._finished: list[str] = []
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        self._held: defaultdict[str, dict[Any, Any]] = defaultdict(dict)  # rows by table, and there by their keys
        self._spans: list[Row] = []
        self._is_holding = False

    # ------------------------------------------------------------------ what a dialect gives

    @abstractmethod
    def select_stored(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Rows as they are in the database; for what is known not to be held back."""

    @abstractmethod
    def _write_held(self) -> None:
        """Write all rows held back."""

    @abstractmethod
    def _within(self, column: str, values: Collection[object], parameters: list[object]) -> str:
        """That a column has one of these values, which are appended to the parameters."""

    @abstractmethod
    def _id(self, text: str) -> str:
        """The id itself; one that no row has, where a column of texts cannot hold it."""

    @abstractmethod
    def _take_number(self) -> int:
        """The number of a new rollout."""

    @abstractmethod
    def _load_usage(self, entry: SqlEntry, attempt: Attempt) -> None:
        """Read what an attempt has used of its quota, unless that is known."""

    # ------------------------------------------------------------------ rows held back

    def _hold(self, table: str, key: object, row: object) -> None:
        self._set(self._held[table], key, row)
        self._is_holding = True

    def flush(self) -> None:
        """Write all rows held back; the transaction stays open."""
        if self._is_holding:
            if self._undo:
                self.is_spoiled = True
                self._undo.clear()
            self._write_held()
            self._hold_nothing()

    def keep(self) -> None:
        super().keep()
        self.is_spoiled = False

    def forget(self) -> None:
        """Drop everything remembered: another connection has written, or a batch was rolled back."""
        self._undo.clear()
        self.is_spoiled = False
        self.notices = []
        self._kept_notices = 0
        self._remember_nothing()

    def trim(self) -> None:
        """Forget rollouts that are over, and all if there are too many; only when nothing is held back."""
        for rollout_id in self._finished:
            self.entries.pop(rollout_id, None)
            self._sequences.pop(rollout_id, None)
        self._finished = []
        for remembered in (self._sequences, *self._records.values()):
            if len(remembered) > MOST_ENTRIES:
                remembered.clear()
        self._make_room()

    def _make_room(self) -> None:
        if len(self.entries) + len(self._absent) > MOST_ENTRIES:
            self.flush()
            self.entries.clear()
            self._absent.clear()

    def select_rows(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Rows as the transaction sees them, its own writes included."""
        self.flush()
        return self.select_stored(sql, parameters)

    # ------------------------------------------------------------------ rollouts

    def find(self, rollout_id: str) -> SqlEntry | None:
        entry = self.entries.get(rollout_id)
        if entry is None and rollout_id not in self._absent:
            self.load([rollout_id])
            entry = self.entries.get(rollout_id)
        return entry

    def load(self, rollout_ids: Collection[str]) -> None:
        """Read rollouts, whether they exist or not; rows that are held back are all of remembered ones."""
        found = self._read_entries("rollout_id", rollout_ids)
        self._absent.update(set(rollout_ids).difference([entry.rollout.rollout_id for entry in found]))

    def _read_entries(self, key: str, values: Collection[object]) -> list[SqlEntry]:
        """Read rollouts with their attempts, in the order of their numbers."""
        self._make_room()
        parameters: list[Any] = []
        sql = READ_ROLLOUTS.format(self._within(key, values, parameters))
        found: dict[int, SqlEntry] = {}
        for row in self.select_stored(sql, parameters):
            entry = found.get(row[0])
            if entry is None:
                entry = found[row[0]] = entry_of(row)
                self.entries[entry.rollout.rollout_id] = entry
            if row[ROLLOUT_WIDTH] is not None:
                entry.attempts.append(attempt_of(row[ROLLOUT_WIDTH:], entry.rollout.rollout_id))
        return list(found.values())

    def _put_rollout(self, rollout: Rollout) -> SqlEntry:
        """What is remembered is what a reader of the database would get."""
        entry = self.find(rollout.rollout_id)
        if is_finished(rollout):
            self._finished.append(rollout.rollout_id)
        if entry is None:
            self._make_room()
            json = rollout_json(rollout)
            entry = SqlEntry(rollout_as_read(rollout, json), self._take_number(), json=json)
            self._absent.discard(rollout.rollout_id)
            self._set(self.entries, rollout.rollout_id, entry)
            self._hold("new rollouts", entry.number, entry)
            self._put_input(entry, rollout.input)
            self._hold_index(entry)
            return entry
        before = entry.rollout
        self._undo += [(setattr, (entry, "rollout", before)), (setattr, (entry, "json", entry.json))]
        self._hold_changed(entry)
        entry.rollout = rollout
        if (
            rollout.config is not before.config
            or rollout.metadata is not before.metadata
            or rollout.output is not before.output
        ):
            entry.json = rollout_json(rollout)
            entry.rollout = rollout_as_read(rollout, entry.json)
        if rollout.input is not before.input:
            self._put_input(entry, rollout.input)
        if (
            rollout.reward != before.reward
            or rollout.metadata is not before.metadata
            or rollout.input is not before.input
        ):
            self._hold_index(entry)
        return entry

    def _hold_index(self, entry: SqlEntry) -> None:
        attempt = entry.attempts[-1] if entry.attempts else None
        values = [_storable(value) for value in index_values(entry.rollout, attempt)]
        self._hold("rollout_index", entry.number, (entry.number, *values))

    def _put_input(self, entry: SqlEntry, value: object) -> None:
        body = as_json(value, "input")
        self._hold("inputs", entry.number, (entry.number, body))
        entry.rollout = replaced(entry.rollout, input=orjson.loads(body))

    def _hold_changed(self, entry: SqlEntry) -> None:
        if entry.number not in self._held["new rollouts"]:  # else its row will be as it then is
            self._hold("changed rollouts", entry.number, entry)

    def schedule(self, rollout_id: str, due: float | None) -> None:
        entry = self.known(rollout_id)
        if entry.due != due:
            self._hold_changed(entry)
            self._undo.append((setattr, (entry, "due", entry.due)))
            entry.due = due
        if due is not None and (self.earliest_due is None or due < self.earliest_due):
            self.earliest_due = due

    def overdue(self, now: float) -> Sequence[str]:
        rows = self.select_rows("SELECT number FROM rollouts WHERE due < ?", (now,))
        entries = self._read_entries("number", [number for (number,) in rows]) if rows else []
        overdue = [(entry.due, entry.rollout.rollout_id) for entry in entries if entry.due is not None]
        return [rollout_id for due, rollout_id in sorted(overdue) if due < now]

    def queue_ids(self) -> Sequence[str]:
        return [rollout_id for (rollout_id,) in self.select_rows(_QUEUED)]

    # ------------------------------------------------------------------ attempts, spans, sequence ids

    def _put_attempt(self, entry: SqlEntry, attempt: Attempt) -> None:
        row = attempt_row(attempt, entry.number)
        self._hold("attempts", (entry.number, attempt.sequence_id), row)
        if attempt.metadata is not None:
            attempt = replaced(attempt, metadata=orjson.loads(row[-2]))
        is_error_kept = len(entry.attempts) == attempt.sequence_id and entry.attempts[-1].status in ENDED_BADLY
        super()._put_attempt(entry, attempt)
        if is_error_kept or attempt.status in ENDED_BADLY or len(entry.attempts) > 1:
            self._hold_index(entry)

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        """A span is one row: that it is also the attempt's heartbeat is seen when the attempt is read."""
        entry, sequence = self.known(attempt.rollout_id), attempt.sequence_id
        self._load_usage(entry, attempt)
        known, (count, size) = entry.span_ids.get(sequence), entry.usage.get(sequence, (0, 0))
        before, rows, added = entry.attempts[sequence - 1], [], 0
        for span in spans:
            body = span_as_json(span)
            check_json_size(span, len(body), self.limits.span_bytes)
            added += len(body)
            rows.append((entry.number, sequence, span.span_id, span.sequence_id, now, body))
        self._check_quota(attempt, count + len(spans), size + added)
        self._undo.append((self._drop_spans, (entry, before, len(self._spans), (count, size))))
        self._is_holding = True
        self._spans += rows
        if known is not None:
            known.update([span.span_id for span in spans])
        entry.usage[sequence] = count + len(spans), size + added
        highest = max([span.sequence_id for span in spans])
        if highest > self._sequences.get(attempt.rollout_id, highest):
            self._set(self._sequences, attempt.rollout_id, highest)
        alive = entry.attempts[sequence - 1] = replaced(attempt, last_heartbeat_time=now)
        if (entry.number, sequence) in self._held["attempts"]:  # its row covers these spans too
            self._hold("attempts", (entry.number, sequence), attempt_row(alive, entry.number))
        return alive

    def _drop_spans(self, entry: SqlEntry, attempt: Attempt, place: int, used: tuple[int, int]) -> None:
        """Undo `append_spans`: what came from this place on goes, and the attempt is as it was."""
        known = entry.span_ids.get(attempt.sequence_id, set())
        known.difference_update([row[2] for row in self._spans[place:]])
        del self._spans[place:]
        entry.usage[attempt.sequence_id] = used
        entry.attempts[attempt.sequence_id - 1] = attempt

    def get_last_sequence(self, rollout_id: str) -> int:
        if rollout_id not in self._sequences:
            entry = self.find(rollout_id)
            number = entry.number if entry else 0
            stored = self.select_stored(_LAST_SEQUENCE, (rollout_id, number))[0][0] or 0
            held = max([row[3] for row in self._spans if row[0] == number], default=0)
            self._sequences[rollout_id] = max(stored, held)
        return self._sequences[rollout_id]

    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        super().put_last_sequence(rollout_id, sequence_id)
        self._hold("sequences", rollout_id, (rollout_id, sequence_id))

    # ------------------------------------------------------------------ other records

    def _get_record(self, kind: type[KeyedT], key: str) -> KeyedT | None:
        if kind is OpenSpans:
            rows = self.select_rows(f"SELECT body FROM open_spans WHERE {_OF_ROLLOUT}", (self._id(key),))
            spans = [Span.model_validate(fields) for (body,) in rows for fields in orjson.loads(body)]
            return cast("KeyedT", OpenSpans(key, spans))
        if key not in self._records[kind]:
            self.load_records(kind, [key])
        return super()._get_record(kind, key)

    def load_records(self, kind: type, keys: Collection[str]) -> None:
        """Read records, whether they exist or not."""
        table, parameters = RECORD_TABLES[kind], list[Any]()
        sql = f"SELECT {table.column_list} FROM {table.name} WHERE {self._within(table.columns[0], keys, parameters)}"
        self._keep_records(kind, keys, self.select_stored(sql, parameters))

    def _keep_records(self, kind: type, keys: Collection[str], rows: Sequence[Row]) -> None:
        self._records[kind].update(dict.fromkeys(keys))
        self._records[kind].update((row[0], RECORD_TABLES[kind].record_of(row)) for row in rows)

    def _put_record(self, record: object) -> None:
        if isinstance(record, OpenSpans):
            number = self.known(record.rollout_id).number
            body = orjson.dumps([orjson.Fragment(span_as_json(span)) for span in record.spans])
            self._hold("open_spans", number, (number, body))
            return
        table = RECORD_TABLES[type(record)]
        row = table.row_of(record)
        self._hold(table.name, row[0], row)
        super()._put_record(table.record_of(row))

    def _put_metrics(self, point: MetricPoint) -> None:
        row = (point.run_id, point.step, point.time, as_json(point.values, "values"))
        self._hold("metrics", next(self._places), row)

    # ------------------------------------------------------------------ selections

    def select(
        self, kind: type[SelectedT], selection: Selection, of: str | Attempt | None = None
    ) -> PaginatedResult[SelectedT]:
        if kind is Rollout:
            with self._scanning(selection):
                rows, total = self._select_page("number", _tables_of(selection), selection)
            numbers = [number for (number,) in rows]
            by_number = {entry.number: entry for entry in self._read_entries("number", numbers)} if numbers else {}
            rollouts = [by_number[number].rollout for number in numbers]
            return selection.page(cast("list[SelectedT]", rollouts), total)
        if kind is Span:
            return cast("PaginatedResult[SelectedT]", self._select_spans(selection, of))
        if kind is MetricPoint:
            columns = "run_id, step, time, body"
            rows, total = self._select_page(columns, "metrics", selection, "run_id = ?", self._id(str(of)))
            metrics = [MetricPoint(run_id=r, step=s, time=t, values=orjson.loads(body)) for r, s, t, body in rows]
            return selection.page(cast("list[SelectedT]", metrics), total)
        table = RECORD_TABLES[kind]
        rows, total = self._select_page(table.column_list, table.name, selection)
        return selection.page([table.record_of(row) for row in rows], total)

    def _select_spans(self, selection: Selection, of: str | Attempt | None) -> PaginatedResult[Span]:
        """Spans of a rollout, or of one attempt; what is not a column is looked for in their bodies."""
        must, parameters = _OF_ROLLOUT, list[Any]([self._id(of.rollout_id if isinstance(of, Attempt) else str(of))])
        if isinstance(of, Attempt):
            must, parameters = f"{must} AND attempt = ?", [*parameters, of.sequence_id]
        if selection.conditions or selection.sort_by not in (None, "sequence_id"):
            rows, _ = self._select_page("body", "spans", Selection(), must, *parameters)
            return choose([span_of_json(body) for (body,) in rows], selection)
        rows, total = self._select_page("body", "spans", selection, must, *parameters)
        return selection.page([span_of_json(body) for (body,) in rows], total)

    def _select_page(
        self, columns: str, table: str, selection: Selection, must: str = "", *must_parameters: object
    ) -> tuple[list[Row], int]:
        """The rows of a page, and how many there are on all pages; those that sort alike come in their order."""
        parameters: list[Any] = [*must_parameters]
        terms = [must] if must else []
        joint = " OR " if selection.filter_logic == "or" else " AND "
        if selection.conditions:
            terms.append(f"({joint.join([self._term(condition, parameters) for condition in selection.conditions])})")
        source = f"{table} WHERE {' AND '.join(terms)}" if terms else table
        order = self.orders[selection.sort_order]
        if selection.sort_by == "start_time":
            order = selection.sort_order  # it is never missing, and its index is not in the order of one that may be
        elif (selection.sort_by or "").endswith("_time"):  # what has not happened yet comes after what has
            order = "ASC NULLS LAST" if selection.sort_order == "asc" else "DESC NULLS FIRST"
        first = "" if selection.sort_by is None else f"{selection.sort_by} {order}, "
        page = (selection.limit if selection.limit >= 0 else _ALL, selection.offset)
        sql = f"SELECT {columns} FROM {source} ORDER BY {first}number LIMIT ? OFFSET ?"
        rows = self.select_rows(sql, [*parameters, *page])
        total = len(rows) + selection.offset
        if selection.limit >= 0 or (selection.offset and not rows):
            counted = source if selection.conditions else source.partition(" LEFT JOIN ")[0]  # only sorted by
            total = self.select_rows(f"SELECT count(*) FROM {counted}", parameters)[0][0]
        return rows, total

    def _term(self, condition: Condition, parameters: list[object]) -> str:
        """A condition, whose parameters are appended; its field is known to exist, so it is safe to write out."""
        if condition.kind == "within":
            return self._within(condition.field, sorted(condition.value, key=str), parameters)
        is_input = condition.field == "input"
        parameters.append(condition.value.encode() if is_input else condition.value)
        return self.terms["input" if is_input else condition.kind].format(condition.field)

    def _scanning(self, selection: Selection) -> AbstractContextManager[None]:
        """Around statements that may read all rollouts."""
        return nullcontext()

    def counts(self) -> dict[str, int]:
        tables = ("rollouts", "attempts", "resources", "workers", "runs", "queue")
        counted = ", ".join(f"(SELECT count(*) FROM {table})" for table in tables)
        *found, queued, spans, span_bytes = self.select_rows(f"SELECT {counted}, {self.span_counts}")[0]
        totals = {f"total_{table}": count for table, count in zip(tables, found, strict=False)}
        return {**totals, "total_spans": spans, "queue_length": queued, "total_span_bytes": span_bytes}


def _tables_of(selection: Selection) -> str:
    """The tables in which the fields of a selection of rollouts are."""
    fields = {condition.field for condition in selection.conditions} | {selection.sort_by}
    index = " LEFT JOIN rollout_index ON rollout_index.rollout = number" if fields.intersection(INDEX_COLUMNS) else ""
    inputs = " JOIN inputs ON inputs.rollout = number" if "input" in fields else ""
    return f"rollouts{index}{inputs}"


def _storable(value: object) -> Any:
    """A text that every database keeps: neither NUL nor half a character."""
    return value.replace("\0", "").encode(errors="replace").decode() if isinstance(value, str) else value
