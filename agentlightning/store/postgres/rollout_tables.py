"""Rollouts, attempts, spans and the queue in PostgreSQL, as one transaction meets them.

A rollout is read with its attempts in one statement. What JSON cannot hold is refused when it is put, never when it is
sent.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final

import orjson

from agentlightning.store.postgres.session import PostgresSession, is_storable
from agentlightning.store.rows import (
    ATTEMPT_COLUMNS,
    ROLLOUT_COLUMNS,
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
from agentlightning.store.sql import select_open_spans, select_page, select_spans
from agentlightning.store.transaction import Transaction
from agentlightning.store.values import as_json, check_json_size, replaced, span_as_json
from agentlightning.types import Attempt, PaginatedResult, Rollout, Span

__all__ = ["RolloutTransaction"]

_LOCK: Final = "SELECT 1 FROM rollouts WHERE {key} = ANY(?::{kind}[]) ORDER BY number FOR UPDATE"
_READ: Final = f"""
SELECT r.number, q.position, r.due, i.body, {", ".join(f"r.{name}" for name in ROLLOUT_COLUMNS.split(", "))},
       a.sequence_id, a.attempt_id, a.status, a.start_time, a.end_time, a.worker_id,
       coalesce((SELECT arrival_time FROM spans
                 WHERE spans.rollout = a.rollout AND spans.attempt = a.sequence_id AND spans.number > a.heartbeat_span
                 ORDER BY spans.number DESC LIMIT 1), a.last_heartbeat_time),
       a.metadata
FROM rollouts r
JOIN inputs i ON i.rollout = r.number
LEFT JOIN queue q ON q.rollout = r.number
LEFT JOIN attempts a ON a.rollout = r.number
WHERE r.{{key}} = ANY(?::{{kind}}[]) ORDER BY r.number, a.sequence_id
"""
_BY_ID: Final = _LOCK.format(key="rollout_id", kind="text"), _READ.format(key="rollout_id", kind="text")
_BY_NUMBER: Final = _LOCK.format(key="number", kind="bigint"), _READ.format(key="number", kind="bigint")
_ROLLOUT_WIDTH: Final = 4 + len(ROLLOUT_COLUMNS.split(", "))
"""Columns of `_READ` before those of the attempt."""

_POP: Final = """
WITH head AS (
    SELECT q.position FROM queue q JOIN rollouts r ON r.number = q.rollout
    ORDER BY q.position LIMIT ? FOR UPDATE OF q, r SKIP LOCKED
), popped AS (
    DELETE FROM queue WHERE position IN (SELECT position FROM head) RETURNING position, rollout
)
SELECT position, rollout FROM popped ORDER BY position
"""
_INSERT_ROLLOUTS: Final = f"""
INSERT INTO rollouts (number, {ROLLOUT_COLUMNS}, due)
SELECT * FROM unnest(?::bigint[], ?::text[], ?::text[], ?::text[], ?::text[], ?::float8[], ?::float8[],
                     ?::bytea[], ?::bytea[], ?::bytea[], ?::float8[])
"""
_UPDATE_ROLLOUTS: Final = """
UPDATE rollouts SET status = u.status, mode = u.mode, resources_id = u.resources_id, end_time = u.end_time,
    config = u.config, metadata = u.metadata, output = u.output, due = u.due
FROM unnest(?::text[], ?::text[], ?::text[], ?::float8[], ?::bytea[], ?::bytea[], ?::bytea[], ?::float8[],
            ?::bigint[]) AS u (status, mode, resources_id, end_time, config, metadata, output, due, number)
WHERE rollouts.number = u.number
"""
_PUT_BODIES: Final = """
INSERT INTO {} SELECT * FROM unnest(?::bigint[], ?::bytea[]) ON CONFLICT (rollout) DO UPDATE SET body = excluded.body
"""
_PUT_ATTEMPTS: Final = f"""
INSERT INTO attempts ({ATTEMPT_COLUMNS})
SELECT u.rollout, u.sequence_id, u.attempt_id, u.status, u.start_time, u.end_time, u.worker_id, u.last_heartbeat_time,
       coalesce((SELECT max(number) FROM spans s WHERE s.rollout = u.rollout AND s.attempt = u.sequence_id), 0),
       u.metadata
FROM unnest(?::bigint[], ?::bigint[], ?::text[], ?::text[], ?::float8[], ?::float8[], ?::text[], ?::float8[],
            ?::bigint[], ?::bytea[]) AS u (rollout, sequence_id, attempt_id, status, start_time, end_time, worker_id,
                                           last_heartbeat_time, heartbeat_span, metadata)
ON CONFLICT (rollout, sequence_id) DO UPDATE SET attempt_id = excluded.attempt_id, status = excluded.status,
    start_time = excluded.start_time, end_time = excluded.end_time, worker_id = excluded.worker_id,
    last_heartbeat_time = excluded.last_heartbeat_time, heartbeat_span = excluded.heartbeat_span,
    metadata = excluded.metadata
"""
_INSERT_SPANS: Final = """
INSERT INTO spans (rollout, attempt, span_id, sequence_id, arrival_time, bytes, body)
SELECT rollout, attempt, span_id, sequence_id, arrival_time, length(body), body
FROM unnest(?::bigint[], ?::bigint[], ?::text[], ?::bigint[], ?::float8[], ?::bytea[])
     WITH ORDINALITY AS s (rollout, attempt, span_id, sequence_id, arrival_time, body, place)
ORDER BY place
"""
_LAST_SEQUENCE: Final = """
SELECT greatest((SELECT last FROM sequences WHERE rollout_id = ?),
                (SELECT max(sequence_id) FROM spans WHERE rollout = ?), 0)
"""
_PUT_SEQUENCES: Final = """
INSERT INTO sequences SELECT * FROM unnest(?::text[], ?::bigint[])
ON CONFLICT (rollout_id) DO UPDATE SET last = excluded.last
"""
_PUSH: Final = """
INSERT INTO queue
SELECT nextval(sequence::regclass), rollout
FROM (SELECT * FROM unnest(?::bigint[], ?::text[]) WITH ORDINALITY AS q (rollout, sequence, place) ORDER BY place) AS q
ON CONFLICT (rollout) DO UPDATE SET position = excluded.position
"""
_PUT_BACK: Final = "INSERT INTO queue SELECT * FROM unnest(?::bigint[], ?::bigint[]) ON CONFLICT DO NOTHING"
_QUEUED: Final = "SELECT rollout_id FROM queue JOIN rollouts ON number = rollout ORDER BY position"


class Entry(RolloutEntry):
    """A rollout as the transaction knows it; of span ids, those of `offered_span_ids` that an attempt has."""

    __slots__ = ("attempts", "is_queued")

    def __init__(self, rollout: Rollout, number: int, json: Json, due: float | None = None) -> None:
        super().__init__(rollout, number, json, due)
        self.attempts: list[Attempt] = []
        self.is_queued = False


class RolloutTransaction(Transaction):
    """The verbs of a transaction on rollouts, attempts, spans and the queue."""

    def __init__(self, session: PostgresSession, *, max_span_bytes: int) -> None:
        self._session = session
        self._max_span_bytes = max_span_bytes
        self.offered_span_ids: frozenset[str] = frozenset()
        """Ids of the spans that the operation brings, whose presence is read in one statement."""
        self.expected_rollouts = 1
        """How many rollouts the operation may add."""
        self.expected_pops = 0
        """How many rollouts the operations may take from the queue."""
        self._popped: list[tuple[int, str]] = []
        self.earliest_due: float | None = None
        """The earliest moment that was scheduled here."""
        self.forget()
        session.flush = self._flush

    def forget(self) -> None:
        """Remember nothing; only when nothing is held back."""
        self._entries: dict[str, Entry | None] = {}
        self._numbers: list[int] = []
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        self._new: dict[str, Entry] = {}
        self._changed: dict[str, Entry] = {}
        self._inputs: dict[int, bytes] = {}
        self._queue: dict[int, str | None] = {}  # rollout number -> sequence of its new position; None if it leaves
        self._spans: list[Row] = []
        self._attempts: dict[tuple[int, int], Row] = {}
        self._open_spans: dict[int, bytes] = {}
        self._sequences: dict[str, int] = {}

    def _flush(self) -> None:
        """Send what is held back: spans before attempts, whose heartbeat covers them."""
        put = self._session.put
        put(_INSERT_ROLLOUTS, [entry.new_row for entry in self._new.values()])
        put(_UPDATE_ROLLOUTS, [entry.changed_row for entry in self._changed.values()])
        put(_PUT_BODIES.format("inputs"), self._inputs.items())
        leaving = [number for number, sequence in self._queue.items() if sequence is None]
        if leaving:
            self._session.send("DELETE FROM queue WHERE rollout = ANY(?::bigint[])", (leaving,))
        put(_PUSH, [(number, sequence) for number, sequence in self._queue.items() if sequence is not None])
        put(_INSERT_SPANS, self._spans)
        put(_PUT_ATTEMPTS, self._attempts.values())
        put(_PUT_BODIES.format("open_spans"), self._open_spans.items())
        put(_PUT_SEQUENCES, self._sequences.items())
        self._hold_nothing()

    # ------------------------------------------------------------------ rollouts

    def load(self, rollout_ids: Collection[str]) -> None:
        """Lock and read rollouts, whether they exist or not."""
        unknown = [rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id not in self._entries]
        if unknown:
            self._entries.update(dict.fromkeys(unknown))
            self._load(*_BY_ID, [rollout_id for rollout_id in unknown if is_storable(rollout_id)])

    def _load(self, lock: str, read: str, keys: Sequence[Any]) -> list[Entry]:
        if not self._session.is_reader:
            self._session.send(lock, (keys,))
        found: dict[int, Entry] = {}
        for row in self._session.select(read, (keys,)):
            entry = found.get(row[0])
            if entry is None:
                entry = found[row[0]] = _entry_of(row)
            if row[_ROLLOUT_WIDTH] is not None:
                attempt = (entry.number, *row[_ROLLOUT_WIDTH:])
                entry.attempts.append(attempt_of(attempt, entry.rollout.rollout_id))
        self._entries.update((entry.rollout.rollout_id, entry) for entry in found.values())
        return list(found.values())

    def get_rollout(self, rollout_id: str) -> Rollout | None:
        entry = self.find(rollout_id)
        return None if entry is None else entry.rollout

    def get_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        entry = self.find(rollout_id)
        return () if entry is None else entry.attempts

    def find(self, rollout_id: str) -> Entry | None:
        if rollout_id not in self._entries:
            self.load([rollout_id])
        return self._entries[rollout_id]

    def known(self, rollout_id: str) -> Entry:
        """The entry of a rollout the behaviour has already met."""
        entry = self.find(rollout_id)
        if entry is None:
            raise KeyError(rollout_id)
        return entry

    def put_rollout(self, rollout: Rollout) -> None:
        """Insert or replace; what is remembered is what a reader of the database would get."""
        rollout_id = rollout.rollout_id
        entry = self._entries.get(rollout_id)
        before = None if entry is None else entry.rollout
        if entry is None or before is None:
            json = rollout_json(rollout)
            entry = Entry(rollout_as_read(rollout, json), self._take_number(), json)
            self._entries[rollout_id] = self._new[rollout_id] = entry
        else:
            is_same = rollout.config is before.config and rollout.metadata is before.metadata
            if not is_same or rollout.output is not before.output:
                entry.json = rollout_json(rollout)
                rollout = rollout_as_read(rollout, entry.json)
            self._change(entry)
            entry.rollout = rollout
        if before is None or rollout.input is not before.input:
            body = self._inputs[entry.number] = as_json(rollout.input, "input")
            entry.rollout = replaced(entry.rollout, input=orjson.loads(body))

    def _change(self, entry: Entry) -> None:
        """Have its row written; that of a new one will be, as it then is."""
        if entry.rollout.rollout_id not in self._new:
            self._changed[entry.rollout.rollout_id] = entry

    def _take_number(self) -> int:
        if not self._numbers:
            sql = "SELECT nextval('rollouts_number_seq') FROM generate_series(1, ?::int)"
            rows = self._session.fetch(self._session.send(sql, (self.expected_rollouts,)))
            self._numbers = [number for (number,) in reversed(rows)]
        return self._numbers.pop()

    def schedule(self, rollout_id: str, due: float | None) -> None:
        entry = self.known(rollout_id)
        if entry.due != due:
            self._change(entry)
            entry.due = due
        if due is not None and (self.earliest_due is None or due < self.earliest_due):
            self.earliest_due = due

    def overdue(self, now: float) -> Sequence[str]:
        rows = self._session.select("SELECT number FROM rollouts WHERE due < ?", (now,))
        entries = self._load(*_BY_NUMBER, [number for (number,) in rows]) if rows else []
        overdue = [(entry.due, entry.rollout.rollout_id) for entry in entries if entry.due is not None]
        return [rollout_id for due, rollout_id in sorted(overdue) if due < now]

    def select_rollouts(self, selection: Selection) -> PaginatedResult[Rollout]:
        """In a transaction that may write, the rollouts are locked and read again: they may have moved on since."""
        rows, total = select_page(self._session, "number", "rollouts", selection)
        numbers = [number for (number,) in rows]
        by_number = {entry.number: entry for entry in self._load(*_BY_NUMBER, numbers)} if numbers else {}
        items = [by_number[number].rollout for number in numbers]
        return PaginatedResult.model_construct(items=items, limit=selection.limit, offset=selection.offset, total=total)

    # ------------------------------------------------------------------ attempts

    def put_attempt(self, attempt: Attempt) -> None:
        entry = self.known(attempt.rollout_id)
        row = self._attempts[entry.number, attempt.sequence_id] = attempt_row(attempt, entry.number, 0)
        attempt = replaced(attempt, metadata=orjson.loads(row[-1]))
        entry.attempts[attempt.sequence_id - 1 : attempt.sequence_id] = [attempt]

    def remove_latest_attempt(self, rollout_id: str) -> None:
        entry = self.known(rollout_id)
        self._session.flush()
        key = (entry.number, entry.attempts.pop().sequence_id)
        self._session.send("DELETE FROM attempts WHERE rollout = ? AND sequence_id = ?", key)

    # ------------------------------------------------------------------ spans

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        """Spans are one statement: that they are also the attempt's heartbeat is seen when the attempt is read."""
        entry = self.known(attempt.rollout_id)
        for span in spans:
            body = span_as_json(span)
            check_json_size(span, len(body), self._max_span_bytes)
            self._spans.append((entry.number, attempt.sequence_id, span.span_id, span.sequence_id, now, body))
        entry.span_ids.setdefault(attempt.sequence_id, set()).update(span.span_id for span in spans)
        alive = replaced(attempt, last_heartbeat_time=now)
        entry.attempts[attempt.sequence_id - 1] = alive
        return alive

    def load_span_ids(self, rollout_ids: Collection[str]) -> None:
        """Read which of the offered spans these rollouts have; a statement for each would be a round trip for each."""
        found = [self._entries.get(rollout_id) for rollout_id in rollout_ids]
        entries = {entry.number: entry for entry in found if entry is not None}
        if not entries:
            return
        for entry in entries.values():
            for attempt in entry.attempts:
                entry.span_ids.setdefault(attempt.sequence_id, set())
        sql = (
            "SELECT rollout, attempt, span_id FROM spans WHERE rollout = ANY(?::bigint[]) AND span_id = ANY(?::text[])"
        )
        for number, sequence_id, span_id in self._session.select(sql, (list(entries), list(self.offered_span_ids))):
            entries[number].span_ids.setdefault(sequence_id, set()).add(span_id)

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        entry, sequence_id = self.known(attempt.rollout_id), attempt.sequence_id
        known = entry.span_ids.get(sequence_id)
        if known is None or span_id not in self.offered_span_ids:
            sought = sorted(self.offered_span_ids | {span_id})
            sql = "SELECT span_id FROM spans WHERE rollout = ? AND attempt = ? AND span_id = ANY(?::text[])"
            rows = self._session.select(sql, (entry.number, sequence_id, sought))
            known = entry.span_ids.setdefault(sequence_id, set())
            known.update(found for (found,) in rows)
        return span_id in known

    def select_spans(self, rollout_id: str, attempt: Attempt | None, selection: Selection) -> PaginatedResult[Span]:
        return select_spans(self._session, rollout_id if is_storable(rollout_id) else "", attempt, selection)

    def put_open_spans(self, rollout_id: str, spans: Sequence[Span]) -> None:
        number = self.known(rollout_id).number
        self._open_spans[number] = orjson.dumps([orjson.Fragment(span_as_json(span)) for span in spans])

    def get_open_spans(self, rollout_id: str) -> list[Span]:
        return select_open_spans(self._session, rollout_id if is_storable(rollout_id) else "")

    def get_last_sequence(self, rollout_id: str) -> int:
        held = self._sequences.get(rollout_id)
        if held is not None and not self._spans:
            return held
        entry = self.find(rollout_id)
        if entry is None and not self._session.is_reader:  # there is no row to lock
            self._session.send("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (rollout_id,))
        return int(self._session.select(_LAST_SEQUENCE, (rollout_id, entry.number if entry else 0))[0][0])

    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        self._sequences[rollout_id] = sequence_id

    # ------------------------------------------------------------------ queue

    def push(self, rollout_id: str, *, front: bool = False) -> None:
        entry = self.known(rollout_id)
        if not entry.is_queued:
            entry.is_queued = True
            self._queue[entry.number] = "queue_head" if front else "queue_tail"

    def pop(self, limit: int) -> list[str]:
        """Take what nobody else has locked; for a whole batch at once, if it will ask for more."""
        if not self._popped:
            self._popped = self._pop(max(limit, self.expected_pops))
        self.expected_pops = max(0, self.expected_pops - limit)
        taken, self._popped = self._popped[:limit], self._popped[limit:]
        return [rollout_id for _, rollout_id in taken]

    def _pop(self, limit: int) -> list[tuple[int, str]]:
        """Positions and ids. A second statement sees what was committed as the first one began."""
        rows = self._session.select(_POP, (limit,)) or self._session.select(_POP, (limit,))
        if not rows:
            return []
        by_number = {entry.number: entry for entry in self._load(*_BY_NUMBER, [number for _, number in rows])}
        return [(position, by_number[number].rollout.rollout_id) for position, number in rows]

    def return_popped(self) -> None:
        """Put back, where it was, what a batch has taken and not asked for."""
        self._session.put(_PUT_BACK, [(place, self.known(rollout_id).number) for place, rollout_id in self._popped])
        self._popped = []

    def unqueue(self, rollout_id: str) -> None:
        entry = self.known(rollout_id)
        if entry.is_queued:
            entry.is_queued = False
            self._queue[entry.number] = None

    def queue_ids(self) -> Sequence[str]:
        return [rollout_id for (rollout_id,) in self._session.select(_QUEUED)]


def _entry_of(row: Row) -> Entry:
    number, position, due, body, *columns = row[:_ROLLOUT_WIDTH]
    entry = Entry(rollout_of(tuple(columns), body), number, (columns[-3], columns[-2], columns[-1]), due)
    entry.is_queued = position is not None
    return entry
