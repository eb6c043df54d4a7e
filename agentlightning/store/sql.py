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
from agentlightning.store.lifecycle import is_finished, is_queuing
from agentlightning.store.selection import ENDED_BADLY, INDEX_COLUMNS, Condition, Selection, choose, index_values
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
from agentlightning.store.transaction import AddedSpans, OpenSpans, SelectedT, StoreLimits, Transaction, Writes
from agentlightning.store.values import as_json, check_json_size, span_as_json, span_of_json
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


class SqlTransaction(Transaction):
    """Rows of a database, as far as they were met, and those that will be written."""

    entries: dict[str, SqlEntry]

    orders: ClassVar[Mapping[str, str]]
    """How to sort `asc` and `desc`, with what is missing before everything else; of times, after it."""
    terms: ClassVar[Mapping[str, str]]
    """How a field is compared, by the kind of the condition; `input` is looked for in the bytes of a body."""
    span_counts: ClassVar[str]
    """The number of all spans and their bytes, as two columns."""

    def __init__(self, limits: StoreLimits) -> None:
        self.earliest_due: float | None = None
        """No rollout is due before this moment, as far as was seen here; None if none is scheduled."""
        self._places = itertools.count()
        super().__init__(limits)

    def _remember_nothing(self) -> None:
        super()._remember_nothing()
        self.entries = {}
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
        self._held[table][key] = row
        self._is_holding = True

    def flush(self) -> None:
        """Write all rows held back; the transaction stays open."""
        if self._is_holding:
            self._write_held()
            self._hold_nothing()

    def forget(self) -> None:
        """Drop everything remembered: another connection has written, or a batch was rolled back."""
        self.discard()
        self.notices, self._applied_notices = [], 0
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

    def spill(self) -> None:
        if len(self.writes) > MOST_ENTRIES:
            self.apply()
            self.flush()
            self.trim()

    def select_rows(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Rows as the transaction sees them, with what was applied."""
        self.flush()
        return self.select_stored(sql, parameters)

    # ------------------------------------------------------------------ rollouts

    def known(self, rollout_id: str) -> SqlEntry:
        """The entry of a rollout, which there must be."""
        entry = self.entries.get(rollout_id) or self.find(rollout_id)
        if entry is None:
            raise KeyError(rollout_id)
        return entry

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

    # ------------------------------------------------------------------ writes

    def _encoded(self, writes: Writes) -> Writes:
        """What JSON cannot hold is refused here. What is remembered is as a reader of the database gets it."""
        encoded = writes.copy()
        for (kind, key), value in writes.items():
            if kind is Rollout:
                encoded[kind, key] = self._encoded_rollout(value)
            elif kind is Attempt:
                self._normalise(key, value)
            elif kind in RECORD_TABLES:
                encoded[kind, key] = RECORD_TABLES[kind].encoded(value)
            elif kind is OpenSpans:
                body = orjson.dumps([orjson.Fragment(span_as_json(span)) for span in value.spans])
                encoded[kind, key] = body
            elif kind is MetricPoint:
                encoded[kind, key] = value.run_id, value.step, value.time, as_json(value.values, "values")
        return encoded

    def _normalise(self, rollout_id: str, attempts: list[Attempt]) -> None:
        """Have attempts that are new or have changed be what a reader of their rows gets."""
        entry = self.entries.get(rollout_id)
        earlier = () if entry is None else entry.attempts
        for place, attempt in enumerate(attempts):
            if attempt.metadata is not None and (place >= len(earlier) or attempt is not earlier[place]):
                attempts[place] = replaced(attempt, metadata=orjson.loads(as_json(attempt.metadata, "metadata")))

    def _encoded_rollout(self, rollout: Rollout) -> tuple[Rollout, Row, bytes | None]:
        """The rollout, its JSON, and that of its input if that is a new one."""
        entry = self.entries.get(rollout.rollout_id) or self.find(rollout.rollout_id)
        before, json, body = None if entry is None else entry.rollout, () if entry is None else entry.json, None
        if (
            before is None
            or rollout.config is not before.config
            or rollout.metadata is not before.metadata
            or rollout.output is not before.output
        ):
            json = rollout_json(rollout)
            rollout = rollout_as_read(rollout, json)
        if before is None or rollout.input is not before.input:
            body = as_json(rollout.input, "input")
            rollout = replaced(rollout, input=orjson.loads(body))
        return rollout, json, body

    def _apply_rollout(self, encoded: tuple[Rollout, Row, bytes | None]) -> None:
        rollout, json, body = encoded
        rollout_id = rollout.rollout_id
        entry = self.entries.get(rollout_id) or self.find(rollout_id)
        if is_finished(rollout):
            self._finished.append(rollout_id)
        metadata = entry.json[1] if entry is not None else b""
        if entry is None:
            before, entry = None, SqlEntry(rollout, self._take_number(), json=json)
            self._absent.discard(rollout_id)
            self.entries[rollout_id] = entry
            self._hold("new rollouts", entry.number, entry)
        else:
            before, entry.rollout, entry.json = entry.rollout, rollout, json
            self._hold_changed(entry)
            if entry.position is not None and not is_queuing(rollout):
                self._leave_queue(entry)
        if body is not None:
            self._hold("inputs", entry.number, (entry.number, body))
        if before is None or rollout.reward != before.reward or json[1] != metadata or body is not None:
            self._hold_index(entry)

    def _hold_index(self, entry: SqlEntry) -> None:
        values = [_storable(value) for value in index_values(entry.rollout, entry.latest)]
        self._hold("rollout_index", entry.number, (entry.number, *values))

    def _hold_changed(self, entry: SqlEntry) -> None:
        if entry.number not in self._held["new rollouts"]:  # else its row will be as it then is
            self._hold("changed rollouts", entry.number, entry)

    def _apply_attempts(self, rollout_id: str, attempts: list[Attempt]) -> None:
        entry = self.known(rollout_id)
        earlier = entry.attempts
        for place, attempt in enumerate(attempts):
            if place >= len(earlier):
                entry.span_ids[attempt.sequence_id] = set()
            elif attempt is earlier[place]:
                continue
            self._hold("attempts", (entry.number, attempt.sequence_id), attempt_row(attempt, entry.number))
        was_error = bool(earlier) and earlier[-1].status in ENDED_BADLY
        entry.attempts = attempts
        if was_error or len(attempts) > 1 or attempts[-1].status in ENDED_BADLY:
            self._hold_index(entry)

    def _apply_spans(self, rollout_attempt: tuple[str, int], added: AddedSpans) -> None:
        """A span is one row: that it is also the attempt's heartbeat is seen when the attempt is read."""
        rollout_id, number = rollout_attempt
        spans, rows, usage, now = added
        entry = self.known(rollout_id)
        attempt, known = entry.attempts[number - 1], entry.span_ids.get(number)
        self._is_holding = True
        self._spans += [(entry.number, number, *row) for row in rows]
        if known is not None:
            known.update([span.span_id for span in spans])
        entry.usage[number] = usage
        last = max([span.sequence_id for span in spans])
        if last > self._sequences.get(rollout_id, last):
            self._sequences[rollout_id] = last
        if now is not None:  # in place: nobody else has this object, and spans are many
            attempt.__dict__["last_heartbeat_time"] = now
        if now is None or (entry.number, number) in self._held["attempts"]:  # its row covers these spans too
            self._hold("attempts", (entry.number, number), attempt_row(attempt, entry.number))

    def _apply_record(self, kind: Any, key: str, record: Any) -> None:
        if kind is OpenSpans:
            number = self.known(key).number
            self._hold("open_spans", number, (number, record))
        else:
            self._records[kind][key], row = record
            self._hold(RECORD_TABLES[kind].name, key, row)

    def _apply_metrics(self, point: Row) -> None:
        self._hold("metrics", next(self._places), point)

    def _apply_sequence(self, rollout_id: str, sequence_id: int) -> None:
        super()._apply_sequence(rollout_id, sequence_id)
        self._hold("sequences", rollout_id, (rollout_id, sequence_id))

    def _apply_due(self, rollout_id: str, due: float | None) -> None:
        entry = self.known(rollout_id)
        if entry.due != due:
            entry.due = due
            self._hold_changed(entry)
        if due is not None and (self.earliest_due is None or due < self.earliest_due):
            self.earliest_due = due

    # ------------------------------------------------------------------ schedule and queue

    def overdue(self, now: float) -> Sequence[str]:
        rows = self.select_rows("SELECT number FROM rollouts WHERE due < ?", (now,))
        entries = self._read_entries("number", [number for (number,) in rows]) if rows else []
        overdue = [(entry.due, entry.rollout.rollout_id) for entry in entries if entry.due is not None]
        return [rollout_id for due, rollout_id in sorted(overdue) if due < now]

    def queue_ids(self) -> Sequence[str]:
        return [rollout_id for (rollout_id,) in self.select_rows(_QUEUED)]

    # ------------------------------------------------------------------ spans and sequence ids

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float | None) -> None:
        arrival = now if now is not None else attempt.last_heartbeat_time or attempt.start_time
        rows, size = [], 0
        for span in spans:
            body = span_as_json(span)
            check_json_size(span, len(body), self.limits.span_bytes)
            size += len(body)
            rows.append((span.span_id, span.sequence_id, arrival, body))
        self._add_spans(attempt, spans, rows, size, now)

    def _usage_of(self, attempt: Attempt) -> tuple[int, int]:
        entry = self.entries.get(attempt.rollout_id) or self.find(attempt.rollout_id)
        if entry is not None and attempt.sequence_id not in entry.usage:
            self._load_usage(entry, attempt)
        return super()._usage_of(attempt)

    def _stored_sequence(self, rollout_id: str) -> int:
        if rollout_id not in self._sequences:
            entry = self.find(rollout_id)
            number = entry.number if entry else 0
            stored = self.select_stored(_LAST_SEQUENCE, (rollout_id, number))[0][0] or 0
            held = max([row[3] for row in self._spans if row[0] == number], default=0)
            self._sequences[rollout_id] = max(stored, held)
        return self._sequences[rollout_id]

    # ------------------------------------------------------------------ other records

    def _get_record(self, kind: type, key: str) -> Any:
        if kind is OpenSpans:
            rows = self.select_rows(f"SELECT body FROM open_spans WHERE {_OF_ROLLOUT}", (self._id(key),))
            return OpenSpans(key, [Span.model_validate(each) for (body,) in rows for each in orjson.loads(body)])
        if key not in self._records[kind]:
            self.load_records(kind, [key])
        return self._records[kind].get(key)

    def load_records(self, kind: type, keys: Collection[str]) -> None:
        """Read records, whether they exist or not."""
        table, parameters = RECORD_TABLES[kind], list[Any]()
        sql = f"SELECT {table.column_list} FROM {table.name} WHERE {self._within(table.columns[0], keys, parameters)}"
        self._keep_records(kind, keys, self.select_stored(sql, parameters))

    def _keep_records(self, kind: type, keys: Collection[str], rows: Sequence[Row]) -> None:
        self._records[kind].update(dict.fromkeys(keys))
        self._records[kind].update((row[0], RECORD_TABLES[kind].record_of(row)) for row in rows)

    # ------------------------------------------------------------------ selections

    def select(
        self, kind: type[SelectedT], selection: Selection, of: str | Attempt | None = None
    ) -> PaginatedResult[SelectedT]:
        if kind is Rollout:
            self._make_room()
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
