"""Transactions on a PostgreSQL connection, each for one operation or a batch of them.

A writing transaction locks the row of a rollout before it reads anything of it, and reads in a statement of its own
after the lock, so that it sees what the last holder of the lock has committed. Rows are held back and sent together
with the COMMIT, in one round trip; a selection sends them before it reads. A reading transaction has one snapshot.

Locks are taken in one order, so that writers wait for each other and do not deadlock: rollouts by their numbers, then
the queue, then workers and runs. `docs/design/transactions.md` has the rules.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import orjson

from agentlightning.store.base import LightningStore
from agentlightning.store.claims import RUNNING_ATTEMPTS
from agentlightning.store.local import Call
from agentlightning.store.operations import operations_of
from agentlightning.store.postgres.session import PostgresSession, is_storable
from agentlightning.store.selection import Condition, Selection
from agentlightning.store.sql import SqlTransaction
from agentlightning.store.tables import ATTEMPT_COLUMNS, RECORD_TABLES, ROLLOUT_COLUMNS, Row, SqlEntry
from agentlightning.store.transaction import Entry, StoreLimits
from agentlightning.types import Attempt, ResourcesUpdate, Run, Span, Worker

_POP: Final = """
WITH head AS (
    SELECT q.position FROM queue q JOIN rollouts r ON r.number = q.rollout
    ORDER BY q.position LIMIT ? FOR UPDATE OF q, r SKIP LOCKED
), popped AS (
    DELETE FROM queue WHERE position IN (SELECT position FROM head) RETURNING position, rollout
)
SELECT position, rollout FROM popped ORDER BY position
"""
_PUT_BODIES: Final = """
INSERT INTO {} SELECT * FROM unnest(?::bigint[], ?::bytea[]) ON CONFLICT (rollout) DO UPDATE SET body = excluded.body
"""
_LOCK_NEW_WORKERS: Final = (
    "SELECT pg_advisory_xact_lock(key) FROM "
    "(SELECT hashtextextended(id, 0) AS key FROM unnest(?::text[]) AS id ORDER BY 1) AS keys"
)
"""Copies of the first claim of a worker, which has no row yet, wait for each other."""
_PLAN_BY: Final = "SELECT " + ", ".join(
    f"set_config('{name}', ?, true)"
    for name in ("plan_cache_mode", "enable_nestloop", "enable_seqscan", "enable_hashjoin")
)
_FEW: Final = frozenset(["rollout_id", "step", "group_id"])
"""Fields by which a selection names few rollouts, which indices find."""
_USAGE: Final = (
    "SELECT rollout, attempt, count(*), sum(bytes)::bigint FROM spans WHERE rollout = ANY(?::bigint[]) GROUP BY 1, 2"
)
_PUT_BACK: Final = "INSERT INTO queue SELECT * FROM unnest(?::bigint[], ?::bigint[]) ON CONFLICT DO NOTHING"

_WRITES: Final = {
    "new rollouts": f"""
INSERT INTO rollouts (number, {ROLLOUT_COLUMNS}, due)
SELECT * FROM unnest(?::bigint[], ?::text[], ?::text[], ?::text[], ?::text[], ?::float8[], ?::float8[],
                     ?::bytea[], ?::bytea[], ?::bytea[], ?::float8[])
""",
    "changed rollouts": """
UPDATE rollouts SET status = u.status, mode = u.mode, resources_id = u.resources_id, end_time = u.end_time,
    config = u.config, metadata = u.metadata, output = u.output, due = u.due
FROM unnest(?::text[], ?::text[], ?::text[], ?::float8[], ?::bytea[], ?::bytea[], ?::bytea[], ?::float8[],
            ?::bigint[]) AS u (status, mode, resources_id, end_time, config, metadata, output, due, number)
WHERE rollouts.number = u.number
""",
    "inputs": _PUT_BODIES.format("inputs"),
    "rollout_index": """
INSERT INTO rollout_index
SELECT * FROM unnest(?::bigint[], ?::float8[], ?::text[], ?::bigint[], ?::text[], ?::text[], ?::text[])
ON CONFLICT (rollout) DO UPDATE SET reward = excluded.reward, run_id = excluded.run_id, step = excluded.step,
    group_id = excluded.group_id, agent = excluded.agent, error = excluded.error
""",
    "leaving": "DELETE FROM queue WHERE rollout IN (SELECT unnest(?::bigint[]))",
    "queue": """
INSERT INTO queue
SELECT nextval('queue_tail'), rollout
FROM (SELECT * FROM unnest(?::bigint[]) WITH ORDINALITY AS q (rollout, place) ORDER BY place) AS q
ON CONFLICT (rollout) DO UPDATE SET position = excluded.position
""",
    "spans": """
INSERT INTO spans (rollout, attempt, span_id, sequence_id, arrival_time, bytes, body)
SELECT rollout, attempt, span_id, sequence_id, arrival_time, length(body), body
FROM unnest(?::bigint[], ?::bigint[], ?::text[], ?::bigint[], ?::float8[], ?::bytea[])
     WITH ORDINALITY AS s (rollout, attempt, span_id, sequence_id, arrival_time, body, place)
ORDER BY place
""",
    "attempts": f"""
INSERT INTO attempts ({ATTEMPT_COLUMNS})
SELECT u.*, coalesce((SELECT max(number) FROM spans s WHERE s.rollout = u.rollout AND s.attempt = u.sequence_id), 0)
FROM unnest(?::bigint[], ?::bigint[], ?::text[], ?::text[], ?::float8[], ?::float8[], ?::text[], ?::float8[],
            ?::bytea[], ?::float8[]) AS u (rollout, sequence_id, attempt_id, status, start_time, end_time, worker_id,
                                           last_heartbeat_time, metadata, lease_until)
ON CONFLICT (rollout, sequence_id) DO UPDATE SET attempt_id = excluded.attempt_id, status = excluded.status,
    start_time = excluded.start_time, end_time = excluded.end_time, worker_id = excluded.worker_id,
    last_heartbeat_time = excluded.last_heartbeat_time, heartbeat_span = excluded.heartbeat_span,
    metadata = excluded.metadata, lease_until = excluded.lease_until
""",
    "open_spans": _PUT_BODIES.format("open_spans"),
    "sequences": """
INSERT INTO sequences SELECT * FROM unnest(?::text[], ?::bigint[])
ON CONFLICT (rollout_id) DO UPDATE SET last = excluded.last
""",
    **{table.name: table.upsert for table in RECORD_TABLES.values()},
    "metrics": "INSERT INTO metrics (run_id, step, time, body) VALUES (?, ?, ?, ?)",
}
"""What is written of each kind, in this order: spans before attempts, whose heartbeats cover them."""


class PostgresTransaction(SqlTransaction):
    """Reads and writes that are committed together; used inside the block of its session."""

    orders: ClassVar = {"asc": "ASC NULLS FIRST", "desc": "DESC NULLS LAST"}
    terms: ClassVar = {
        "input": "position(?::bytea IN body) > 0",
        "contains": "strpos({}, ?) > 0",
        "exact": "{} = ?",
        "min": "{} >= ?",
        "max": "{} <= ?",
    }
    span_counts = "(SELECT count(*) FROM spans), (SELECT coalesce(sum(bytes), 0)::bigint FROM spans)"

    def __init__(self, session: PostgresSession, limits: StoreLimits, *, shares_resources: bool = True) -> None:
        self._session = session
        # Resources are only locked where they are not just read, or added.
        self._locked = (Worker, Run) if shares_resources else (Worker, Run, ResourcesUpdate)
        self.offered_span_ids: frozenset[str] = frozenset()
        """Ids of the spans that the operations bring, whose presence is read in one statement."""
        self.expected_rollouts = 1
        """How many rollouts the operations may add."""
        self.expected_pops = 0
        """How many rollouts the operations may take from the queue."""
        self._numbers: list[int] = []
        self._popped: list[tuple[int, str]] = []
        super().__init__(limits)

    # ------------------------------------------------------------------ statements

    def select_stored(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        return self._session.select(sql, parameters)

    def _write_held(self) -> None:
        for table, sql in _WRITES.items():
            rows = self._held[table].values()
            if table == "new rollouts":
                self._session.put(sql, [entry.new_row for entry in rows])
            elif table == "changed rollouts":
                self._session.put(sql, [entry.changed_row for entry in rows])
            elif table == "spans":
                self._session.put(sql, self._spans)
            elif "unnest" in sql:
                self._session.put(sql, rows)
            else:
                for row in rows:
                    self._session.send(sql, row)

    def commit(self) -> None:
        """Send what is held back and the COMMIT; the outcome is known when the pipeline ends."""
        if not self._session.is_reader:
            self.flush()
            # What a batch has taken from the queue and not asked for goes back where it was.
            self._session.put(_PUT_BACK, [(place, self.known(rollout_id).number) for place, rollout_id in self._popped])
            if self.notices:
                self._session.send("INSERT INTO outbox (body) VALUES (?)", (orjson.dumps(self.notices),))
        self._session.send("COMMIT")

    def try_lock(self, key: int) -> bool:
        """Whether this transaction now holds an advisory lock, until it ends."""
        return bool(self.select_rows("SELECT pg_try_advisory_xact_lock(?)", (key,))[0][0])

    def _id(self, text: str) -> str:
        return text if is_storable(text) else ""

    def _within(self, column: str, values: Collection[object], parameters: list[object]) -> str:
        parameters.append([value for value in values if not isinstance(value, str) or is_storable(value)])
        return f"{column} = ANY(?::{'bigint' if column in ('number', 'step') else 'text'}[])"

    def _term(self, condition: Condition, parameters: list[object]) -> str:
        if isinstance(condition.value, str) and not is_storable(condition.value):
            return "FALSE"  # no row has it
        return super()._term(condition, parameters)

    @contextmanager
    def _scanning(self, selection: Selection) -> Iterator[None]:
        """Have statements scan and hash whole tables, unless the selection names few rollouts."""
        is_scan = not _FEW.intersection(condition.field for condition in selection.conditions)
        if is_scan:
            self._session.send(_PLAN_BY, ("force_custom_plan", "off", "on", "on"))
        yield
        if is_scan:
            self._session.send(_PLAN_BY, ("force_generic_plan", "on", "off", "off"))

    # ------------------------------------------------------------------ reading and locking

    def load_records(self, kind: type, keys: Collection[str]) -> None:
        """Read records in one statement, which locks them in the order of their keys."""
        if not keys:
            return
        table, parameters = RECORD_TABLES[kind], list[Any]()
        key = table.columns[0]
        lock = " FOR UPDATE" if kind in self._locked and not self._session.is_reader else ""
        chosen = f"WHERE {self._within(key, keys, parameters)} ORDER BY {key}{lock}"
        self._keep_records(
            kind, keys, self._session.select(f"SELECT {table.column_list} FROM {table.name} {chosen}", parameters)
        )

    def load_claimers(self, worker_ids: Collection[str]) -> None:
        """Lock workers that claim, and have no row that could be locked; one may have come into being meanwhile."""
        absent = [worker_id for worker_id in worker_ids if self.get(Worker, worker_id) is None]
        if absent:
            self._session.send(_LOCK_NEW_WORKERS, (absent,))
            self.load_records(Worker, absent)

    def _read_entries(self, key: str, values: Collection[object]) -> list[SqlEntry]:
        """In a transaction that may write, lock the rows first: what is read then has not moved on since."""
        if not self._session.is_reader:
            parameters: list[Any] = []
            chosen = self._within(key, values, parameters)
            self._session.send(f"SELECT 1 FROM rollouts WHERE {chosen} ORDER BY number FOR UPDATE", parameters)
        return super()._read_entries(key, values)

    def _take_number(self) -> int:
        if not self._numbers:
            sql = "SELECT nextval('rollouts_number_seq') FROM generate_series(1, ?::int)"
            self._numbers = [number for (number,) in reversed(self.select_stored(sql, (self.expected_rollouts,)))]
        return self._numbers.pop()

    def load_span_ids(self, rollout_ids: Collection[str]) -> None:
        """Read which of the offered spans these rollouts have; a statement for each would be a round trip for each."""
        found = [self.entries.get(rollout_id) for rollout_id in rollout_ids]
        entries = {entry.number: entry for entry in found if entry is not None}
        if not entries:
            return
        for entry in entries.values():
            for attempt in entry.attempts:
                entry.span_ids.setdefault(attempt.sequence_id, set())
                entry.usage.setdefault(attempt.sequence_id, (0, 0))
        sent = self._session.send(_USAGE, (list(entries),))
        sql = (
            "SELECT rollout, attempt, span_id FROM spans WHERE rollout = ANY(?::bigint[]) AND span_id = ANY(?::text[])"
        )
        for number, sequence_id, span_id in self.select_rows(sql, (list(entries), list(self.offered_span_ids))):
            entries[number].span_ids.setdefault(sequence_id, set()).add(span_id)
        for number, sequence_id, count, size in self._session.fetch(sent):
            entries[number].usage[sequence_id] = count, size

    def _load_usage(self, entry: SqlEntry, attempt: Attempt) -> None:
        if attempt.sequence_id not in entry.usage:  # such as after the transaction had to forget
            rows = self.select_rows(_USAGE, ([entry.number],))
            entry.usage.update({sequence_id: (count, size) for _, sequence_id, count, size in rows})

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        entry, sequence_id = self.known(attempt.rollout_id), attempt.sequence_id
        known = entry.span_ids.get(sequence_id)
        if known is None or span_id not in self.offered_span_ids:
            sought = sorted(self.offered_span_ids | {span_id})
            sql = "SELECT span_id FROM spans WHERE rollout = ? AND attempt = ? AND span_id = ANY(?::text[])"
            rows = self.select_rows(sql, (entry.number, sequence_id, sought))
            known = entry.span_ids.setdefault(sequence_id, set())
            known.update(found for (found,) in rows)
        return span_id in known

    def _stored_sequence(self, rollout_id: str) -> int:
        if rollout_id not in self._sequences and self.find(rollout_id) is None and not self._session.is_reader:
            # There is no row to lock.
            self._session.send("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (rollout_id,))
        return super()._stored_sequence(rollout_id)

    # ------------------------------------------------------------------ queue

    def _head(self, limit: int) -> list[str]:
        """Take what nobody else has locked; for a whole batch at once, if it will ask for more."""
        if not self._popped:
            wanted = max(limit, self.expected_pops)
            # A second statement sees what was committed as the first one began.
            rows = self.select_rows(_POP, (wanted,)) or self.select_rows(_POP, (wanted,))
            numbers = [number for _, number in rows]
            by_number = {entry.number: entry for entry in self._read_entries("number", numbers)} if numbers else {}
            self._popped = [(position, by_number[number].rollout.rollout_id) for position, number in rows]
        self.expected_pops = max(self.expected_pops - limit, 0)
        taken, self._popped = self._popped[:limit], self._popped[limit:]
        return [rollout_id for _, rollout_id in taken]

    def _enter_queue(self, entry: Entry) -> None:
        entry.position = 0  # its place is given when it is written
        self._hold("queue", entry.number, (entry.number,))

    def _leave_queue(self, entry: Entry) -> None:
        entry.position = None
        self._held["queue"].pop(entry.number, None)
        self._hold("leaving", entry.number, (entry.number,))


# ---------------------------------------------------------------------- reading ahead

_OPERATIONS: Final = operations_of(LightningStore)


def read_ahead(tx: PostgresTransaction, calls: Sequence[Call]) -> None:
    """Have a transaction read and lock the rollouts and workers that the calls name, rollouts by their numbers."""
    rollout_ids, ended, offered = list[Any](), list[Any](), list[Span]()
    workers, claimers = list[Any](), list[Any]()
    new_rollouts = 0
    for call in calls:
        op = _OPERATIONS.get(call.name)
        if op is None or op.is_query:
            continue
        given = op.name_arguments(call.args, call.kwargs)
        spans = [span for span in (given.get("span"), *given.get("spans", ())) if isinstance(span, Span)]
        offered += spans
        pairs = given.get("rollout_attempt_ids", ())
        rollout_ids += [
            given.get("rollout_id"),
            *given.get("rollout_ids", ()),
            *[rollout_id for rollout_id, _ in pairs],
        ]
        rollout_ids += [span.rollout_id for span in spans] + _named_in_heartbeat(given.get("heartbeat_stats"))
        new_rollouts += len(given["rollouts"]) if "rollouts" in given else "input" in given
        workers.append(given.get("worker_id"))
        if "status" in given:  # the worker of the attempt is released
            ended.append(given.get("rollout_id"))
        if op.is_claim:
            claimers.append(given.get("worker_id"))
            tx.expected_pops += given.get("limit", 1)
    tx.offered_span_ids = frozenset(span.span_id for span in offered if is_storable(span.span_id))
    tx.expected_rollouts = max(new_rollouts, 1)
    known_ids = [named for named in rollout_ids if isinstance(named, str)]
    if known_ids:
        tx.load(list(dict.fromkeys(known_ids)))
    tx.load_span_ids({span.rollout_id for span in offered})
    latest = [tx.get_attempts(rollout_id)[-1:] for rollout_id in ended if isinstance(rollout_id, str)]
    workers += [attempt.worker_id for attempts in latest for attempt in attempts]
    tx.load_records(Worker, {worker_id for worker_id in workers if is_storable(worker_id)})
    tx.load_claimers({worker_id for worker_id in claimers if is_storable(worker_id)})


def _named_in_heartbeat(stats: object) -> list[Any]:
    pairs = stats.get(RUNNING_ATTEMPTS) if isinstance(stats, Mapping) else None
    named: Sequence[Any] = pairs if isinstance(pairs, (list, tuple)) else ()
    return [pair[0] for pair in named if isinstance(pair, (list, tuple)) and pair]
