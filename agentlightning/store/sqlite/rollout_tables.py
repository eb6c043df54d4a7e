"""Rollouts, attempts and spans in SQLite.

Rollouts that were met are remembered together with their attempts, so that the ten spans of a rollout read it once
and, arriving in one batch, write its attempt once. What JSON cannot hold is refused when it is put, never when it is
flushed.
"""

from collections.abc import Sequence

import orjson

from agentlightning.store.lifecycle import is_finished
from agentlightning.store.rows import (
    ATTEMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    SELECT_ATTEMPTS,
    Json,
    RolloutEntry,
    Row,
    attempt_of,
    attempt_row,
    rollout_as_read,
    rollout_json,
    rollout_of,
)
from agentlightning.store.selection import Selection
from agentlightning.store.sql import clauses_of
from agentlightning.store.sqlite.session import Session
from agentlightning.store.values import as_json, check_json_size, replaced, span_as_json
from agentlightning.types import Attempt, PaginatedResult, Rollout, Span

__all__ = ["Entry", "RolloutTables"]

CACHED_ROLLOUTS = 2048
"""How many rollouts are remembered between batches."""

_SELECT_ROLLOUT = (
    f"SELECT number, position, due, body, {ROLLOUT_COLUMNS} FROM rollouts "
    "JOIN inputs ON inputs.rollout = number LEFT JOIN queue ON queue.rollout = number"
)
_INSERT_ROLLOUT = f"INSERT INTO rollouts (number, {ROLLOUT_COLUMNS}, due) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE_ROLLOUT = (
    "UPDATE rollouts SET status = ?, mode = ?, resources_id = ?, end_time = ?, config = ?, metadata = ?, output = ?, "
    "due = ? WHERE number = ?"
)
_PUT_ATTEMPT = f"INSERT OR REPLACE INTO attempts ({ATTEMPT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_SPAN = "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT_LAST_SPAN = "SELECT number, bytes_so_far FROM spans ORDER BY number DESC LIMIT 1"


class Entry(RolloutEntry):
    """A rollout as the transaction knows it; of span ids, all those of an attempt or none."""

    __slots__ = ("attempts", "position", "stored_input")

    def __init__(self, rollout: Rollout, number: int, json: Json, due: float | None = None) -> None:
        super().__init__(rollout, number, json, due)
        self.attempts: list[Attempt] | None = None
        """None until they are asked for."""
        self.stored_input: object = None
        """The input that has a row."""
        self.position: int | None = None
        """Place in the queue."""


class RolloutTables:
    """The tables rollouts, inputs, attempts, spans, open_spans and sequences."""

    def __init__(self, session: Session, *, max_span_bytes: int) -> None:
        self._session = session
        self._max_span_bytes = max_span_bytes
        session.flush_with(self.flush)
        self.forget()

    def forget(self) -> None:
        """Remember nothing, hold nothing back."""
        self.entries: dict[str, Entry] = {}
        self._next_number: int | None = None
        self._finished: list[str] = []
        self._new: dict[str, Entry] = {}
        self._changed: dict[str, Entry] = {}
        self._inputs: dict[int, bytes] = {}
        self._attempts: dict[tuple[int, int], Row] = {}
        self._spans: list[Row] = []
        self._open_spans: dict[int, bytes] = {}
        self._last_span: tuple[int, int] | None = None  # its number, and the bytes of all spans
        self._sequences: dict[str, int] = {}

    def trim(self) -> None:
        """Forget rollouts that are over, and all if there are too many; only when nothing is held back."""
        for rollout_id in self._finished:
            self.entries.pop(rollout_id, None)
        self._finished = []
        if len(self.entries) > CACHED_ROLLOUTS:
            self.entries.clear()

    def flush(self) -> None:
        write = self._session.write
        if self._new:
            write(_INSERT_ROLLOUT, [entry.new_row for entry in self._new.values()])
        changed = [entry.changed_row for key, entry in self._changed.items() if key not in self._new]
        if changed:
            write(_UPDATE_ROLLOUT, changed)
        if self._inputs:
            write("INSERT OR REPLACE INTO inputs VALUES (?, ?)", self._inputs.items())
        if self._attempts:
            write(_PUT_ATTEMPT, self._attempts.values())
        if self._spans:
            write(_INSERT_SPAN, self._spans)
        if self._open_spans:
            write("INSERT OR REPLACE INTO open_spans VALUES (?, ?)", self._open_spans.items())
        if self._sequences:
            write("INSERT OR REPLACE INTO sequences VALUES (?, ?)", self._sequences.items())
        self._new, self._changed, self._inputs, self._attempts = {}, {}, {}, {}
        self._spans, self._open_spans, self._sequences = [], {}, {}

    # ------------------------------------------------------------------ rollouts

    def find(self, rollout_id: str) -> Entry | None:
        """A rollout, remembered or stored; rows that are held back are all of remembered ones."""
        entry = self.entries.get(rollout_id)
        if entry is None:
            rows = self._session.select_stored(f"{_SELECT_ROLLOUT} WHERE rollout_id = ?", (rollout_id,))
            if rows:
                entry = self.entries[rollout_id] = _entry_of(rows[0])
        return entry

    def known(self, rollout_id: str) -> Entry:
        """The entry of a rollout the behaviour has already met."""
        return self.entries[rollout_id]

    def put(self, rollout: Rollout) -> None:
        """Insert or replace; what is remembered is what a reader of the file would get."""
        entry = self.find(rollout.rollout_id)
        if entry is None:
            entry = self._insert(rollout)
        else:
            self._session.hold_back(_restore, entry, entry.rollout, entry.json)
            self._changed[rollout.rollout_id] = entry
            before = entry.rollout
            if (
                rollout.config is not before.config
                or rollout.metadata is not before.metadata
                or rollout.output is not before.output
            ):
                entry.json = rollout_json(rollout)
                rollout = rollout_as_read(rollout, entry.json)
            entry.rollout = rollout
        if is_finished(rollout):
            self._finished.append(rollout.rollout_id)
        if rollout.input is not entry.stored_input:
            body = as_json(rollout.input, "input")
            self._session.hold_back(self._restore_input, entry, entry.stored_input, self._inputs.get(entry.number))
            self._inputs[entry.number] = body
            entry.stored_input = orjson.loads(body)
            entry.rollout = replaced(entry.rollout, input=entry.stored_input)

    def _restore_input(self, entry: Entry, stored_input: object, body: bytes | None) -> None:
        entry.stored_input = stored_input
        self._inputs.pop(entry.number, None)
        if body is not None:
            self._inputs[entry.number] = body

    def _insert(self, rollout: Rollout) -> Entry:
        json = rollout_json(rollout)
        entry = Entry(rollout_as_read(rollout, json), self._take_number(), json)
        entry.attempts = []
        entry.stored_input = _NOTHING
        self._session.hold_back(self._remove, rollout.rollout_id, entry.number)
        self.entries[rollout.rollout_id] = self._new[rollout.rollout_id] = entry
        return entry

    def _take_number(self) -> int:
        if self._next_number is None:
            self._next_number = (self._session.select("SELECT max(number) FROM rollouts")[0][0] or 0) + 1
        self._next_number += 1
        return self._next_number - 1

    def _remove(self, rollout_id: str, number: int) -> None:
        self.entries.pop(rollout_id, None)
        self._new.pop(rollout_id, None)
        self._changed.pop(rollout_id, None)
        self._inputs.pop(number, None)

    def set_due(self, rollout_id: str, due: float | None) -> None:
        entry = self.known(rollout_id)
        if entry.due != due:
            self._session.hold_back(setattr, entry, "due", entry.due)
            self._changed[rollout_id] = entry
            entry.due = due

    def overdue(self, now: float) -> Sequence[str]:
        rows = self._session.select("SELECT rollout_id FROM rollouts WHERE due < ? ORDER BY due", (now,))
        return [rollout_id for (rollout_id,) in rows]

    def select(self, selection: Selection) -> PaginatedResult[Rollout]:
        clauses = clauses_of(self._session, selection)
        # The page is chosen before anything is joined to it: rows that are skipped then cost an index entry each.
        chosen = f"SELECT number FROM rollouts{clauses.where}{clauses.order}{clauses.page}"
        page = f"{_SELECT_ROLLOUT} WHERE number IN ({chosen}){clauses.order}"
        entries = [
            _entry_of(row) for row in self._session.select(page, [*clauses.parameters, *clauses.page_parameters])
        ]
        self._load_attempts(entries)
        self.entries.update((entry.rollout.rollout_id, entry) for entry in entries)
        total = len(entries) + selection.offset
        if selection.limit >= 0 or (selection.offset and not entries):
            count = f"SELECT count(*) FROM rollouts{clauses.where}"
            total = self._session.select(count, clauses.parameters)[0][0]
        items = [entry.rollout for entry in entries]
        return PaginatedResult.model_construct(items=items, limit=selection.limit, offset=selection.offset, total=total)

    # ------------------------------------------------------------------ attempts

    def attempts_of(self, entry: Entry) -> list[Attempt]:
        if entry.attempts is None:
            self._load_attempts([entry])
        assert entry.attempts is not None
        return entry.attempts

    def _load_attempts(self, entries: Sequence[Entry]) -> None:
        by_number = {entry.number: entry for entry in entries}
        rows = self._session.select_stored(
            f"{SELECT_ATTEMPTS} WHERE rollout IN (SELECT value FROM json_each(?)) ORDER BY rollout, sequence_id",
            (orjson.dumps(list(by_number)),),
        )
        for entry in entries:
            entry.attempts = []
        for row in rows:
            entry = by_number[row[0]]
            assert entry.attempts is not None
            entry.attempts.append(attempt_of(row, entry.rollout.rollout_id))

    def put_attempt(self, attempt: Attempt) -> None:
        entry = self.known(attempt.rollout_id)
        attempts = self.attempts_of(entry)
        key = (entry.number, attempt.sequence_id)
        row = attempt_row(attempt, entry.number, self._newest_span()[0])
        if attempt.metadata is not None:
            attempt = replaced(attempt, metadata=orjson.loads(row[-1]))
        index = attempt.sequence_id - 1
        self._session.hold_back(self._restore_attempt, key, self._attempts.get(key))
        self._attempts[key] = row
        if index == len(attempts):
            self._session.hold_back(self._forget_attempt, entry, attempt.sequence_id)
            attempts.append(attempt)
            entry.span_ids[attempt.sequence_id] = set()
        else:
            self._session.hold_back(attempts.__setitem__, index, attempts[index])
            attempts[index] = attempt

    def _restore_attempt(self, key: tuple[int, int], row: Row | None) -> None:
        self._attempts.pop(key, None)
        if row is not None:
            self._attempts[key] = row

    def _forget_attempt(self, entry: Entry, sequence_id: int) -> None:
        self.attempts_of(entry).pop()
        entry.span_ids.pop(sequence_id, None)

    def remove_latest_attempt(self, rollout_id: str) -> None:
        """Seldom used, so it goes straight to the database."""
        entry = self.known(rollout_id)
        attempts = self.attempts_of(entry)
        self._session.flush()
        sql = "DELETE FROM attempts WHERE rollout = ? AND sequence_id = ?"
        self._session.write(sql, [(entry.number, len(attempts))])
        self._session.is_spoiled = True
        entry.span_ids.pop(len(attempts), None)
        attempts.pop()

    # ------------------------------------------------------------------ spans

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        """A span is one row: that it is also the attempt's heartbeat is seen when the attempt is read."""
        entry = self.entries[attempt.rollout_id]
        sequence = attempt.sequence_id
        number, total = newest = self._newest_span()
        fresh_ids: list[str] = []
        self._session.hold_back(self._unappend, entry, attempt, newest, len(self._spans), fresh_ids)
        for span in spans:
            body = span_as_json(span)
            check_json_size(span, len(body), self._max_span_bytes)
            number += 1
            total += len(body)
            self._spans.append((number, entry.number, sequence, span.span_id, span.sequence_id, now, total, body))
        self._last_span = number, total
        known = entry.span_ids.get(sequence)
        if known is not None:
            fresh_ids.extend(span.span_id for span in spans if span.span_id not in known)
            known.update(fresh_ids)
        alive = replaced(attempt, last_heartbeat_time=now)
        self.attempts_of(entry)[sequence - 1] = alive
        return alive

    def _unappend(
        self, entry: Entry, attempt: Attempt, newest: tuple[int, int], held_back: int, fresh_ids: list[str]
    ) -> None:
        del self._spans[held_back:]
        self._last_span = newest
        self.attempts_of(entry)[attempt.sequence_id - 1] = attempt
        if attempt.sequence_id in entry.span_ids:
            entry.span_ids[attempt.sequence_id].difference_update(fresh_ids)

    def _newest_span(self) -> tuple[int, int]:
        """Number of the last span, and the bytes of all spans."""
        if self._last_span is None:
            rows = self._session.select_stored(_SELECT_LAST_SPAN)
            self._last_span = rows[0] if rows else (0, 0)
        return self._last_span

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        entry = self.known(attempt.rollout_id)
        known = entry.span_ids.get(attempt.sequence_id)
        if known is None:
            sql = "SELECT span_id FROM spans WHERE rollout = ? AND attempt = ?"
            rows = self._session.select(sql, (entry.number, attempt.sequence_id))
            known = entry.span_ids[attempt.sequence_id] = {found for (found,) in rows}
        return span_id in known

    def put_open_spans(self, rollout_id: str, spans: Sequence[Span]) -> None:
        number = self.known(rollout_id).number
        self._session.hold_back(self._restore_open_spans, number, self._open_spans.get(number))
        self._open_spans[number] = orjson.dumps([orjson.Fragment(span_as_json(span)) for span in spans])

    def _restore_open_spans(self, number: int, body: bytes | None) -> None:
        self._open_spans.pop(number, None)
        if body is not None:
            self._open_spans[number] = body

    def last_sequence(self, rollout_id: str) -> int:
        held = self._sequences.get(rollout_id)
        if held is not None and not self._spans:
            return held
        entry = self.find(rollout_id)
        rows = self._session.select(
            "SELECT max(coalesce((SELECT last FROM sequences WHERE rollout_id = ?), 0), "
            "coalesce((SELECT max(sequence_id) FROM spans WHERE rollout = ?), 0))",
            (rollout_id, entry.number if entry else 0),
        )
        last: int = rows[0][0]
        return last

    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        self._session.hold_back(self._restore_sequence, rollout_id, self._sequences.get(rollout_id))
        self._sequences[rollout_id] = sequence_id

    def _restore_sequence(self, rollout_id: str, sequence_id: int | None) -> None:
        self._sequences.pop(rollout_id, None)
        if sequence_id is not None:
            self._sequences[rollout_id] = sequence_id


_NOTHING = object()


def _restore(entry: Entry, rollout: Rollout, json: Json) -> None:
    entry.rollout, entry.json = rollout, json


def _entry_of(row: Row) -> Entry:
    number, position, due, body, *columns = row
    entry = Entry(rollout_of(tuple(columns), body), number, (columns[-3], columns[-2], columns[-1]), due)
    entry.position = position
    entry.stored_input = entry.rollout.input
    return entry
