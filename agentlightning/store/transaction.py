"""The seam between behaviours and back ends: rows that are read, and writes that lie over them until all is known.

`store/behaviour` says what each operation does in a few verbs and knows nothing of dictionaries or SQL. It reads rows;
what it writes is kept apart, in `writes`. When it is done, the writes are applied to the rows in one step; when it
raises, they are dropped. So nothing is ever undone. The rules, which `docs/design/transactions.md` gives in full:

- Records are never changed in place: a behaviour reads one, makes a changed copy, and puts that. Whoever keeps a record
  may keep it by reference.
- Records, sequence ids and the queue show a behaviour its own writes. Selections, `has_span`, `overdue` and `counts`
  show what was there before the operation.
- What cannot be kept is refused before anything changes. A behaviour may be run again, in a new transaction.
- With several writers, a rollout and all that hangs on it changes under one lock, from the first look at it on.
"""

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from agentlightning.errors import QuotaExceeded
from agentlightning.store.lifecycle import is_queuing
from agentlightning.store.notices import NoticeFields
from agentlightning.store.selection import Selection
from agentlightning.types import (
    Attempt,
    MetricPoint,
    NoticeKind,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    Run,
    Span,
    Worker,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the whole store."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How large a span may be, how much all spans of one attempt, and how long a lease lasts at least."""

    span_bytes: int
    attempt_bytes: int
    attempt_spans: int
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class OpenSpans:
    """The spans of a rollout that had begun and not ended when they were put; some may have ended since."""

    rollout_id: str
    spans: Sequence[Span]


Record = Rollout | Attempt | OpenSpans | ResourcesUpdate | Worker | Run | MetricPoint | Setting
KeyedT = TypeVar("KeyedT", bound=Rollout | OpenSpans | ResourcesUpdate | Worker | Run | Setting)
SelectedT = TypeVar("SelectedT", bound=Rollout | Span | ResourcesUpdate | Worker | Run | MetricPoint)
RECORD_KEYS: Final[Mapping[type, str]] = {
    ResourcesUpdate: "resources_id",
    Worker: "worker_id",
    Run: "run_id",
    Setting: "name",
    OpenSpans: "rollout_id",
}


@dataclass(slots=True, eq=False)
class Entry:
    """A rollout with what hangs on it: what the rows say, without the writes of the operation in progress."""

    rollout: Rollout
    number: int
    """Order of insertion."""
    attempts: list[Attempt] = field(default_factory=list)
    span_ids: dict[int, set[str]] = field(default_factory=dict)
    """Ids of the spans of an attempt, by its number; an attempt may be missing."""
    usage: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Spans of an attempt and their bytes, by its number; as `span_ids`."""
    position: int | None = None
    """Place in the queue."""
    due: float | None = None
    """When the watchdog must look at it."""

    @property
    def latest(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


_NO_USAGE = 0, 0
POPPED: Final = "popped"
PUSHED: Final = "pushed"
DUE: Final = "due"
SEQUENCE: Final = "sequence"
AddedSpans = tuple[Sequence[Span], list[tuple[Any, ...]], tuple[int, int], float | None]
"""Spans that are appended to an attempt, their rows in the back end, what the attempt has used of its quota with them,
and the sign of life that they are, if they are one."""
Writes = dict[tuple[object, Any], Any]
"""What an operation changes, by kind and key, in the order in which it is applied; what is put twice is written once.

A kind is the type of a record, whose key is its id, or one of the four names above, whose key is a rollout id. Under
`Attempt` stand all attempts of a rollout, under `Span`, by rollout id and number of the attempt, what is appended.
"""


class Transaction(ABC):
    """Rows, and the writes of the operation in progress, which take effect together or not at all."""

    entries: Mapping[str, Entry]
    """Rollouts; where a database keeps them, those that were met."""

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.cursor = 0
        """Number of the newest published notice, where the transaction gives notices their cursors."""
        self.notices: list[NoticeFields] = []
        """Not published yet: of operations that were applied and, behind them, of the one in progress."""
        self._applied_notices = 0
        self.writes: Writes = {}
        self._remember_nothing()

    def _remember_nothing(self) -> None:
        self._records: dict[type, dict[str, Any]] = {kind: {} for kind in RECORD_KEYS}
        self._sequences: dict[str, int] = {}
        self._queue: OrderedDict[str, int] = OrderedDict()  # id -> position: the head, in the order of positions

    # ------------------------------------------------------------------ the end of an operation

    def apply(self) -> None:
        """Let the writes take effect, all of them or, if one cannot be kept, none."""
        if self.writes:
            for (kind, key), value in self._encoded(self.writes).items():
                if kind is Span:
                    self._apply_spans(key, value)
                elif kind is Rollout:
                    self._apply_rollout(value)
                elif kind is Attempt:
                    self._apply_attempts(key, value)
                elif kind is PUSHED:
                    self._apply_pushed(key)
                elif kind is POPPED:
                    self._apply_popped(key)
                elif kind is DUE:
                    self._apply_due(key, value)
                elif kind is SEQUENCE:
                    self._apply_sequence(key, value)
                elif kind is MetricPoint:
                    self._apply_metrics(value)
                else:
                    self._apply_record(kind, key, value)
            self.writes.clear()
        self._applied_notices = len(self.notices)

    def _encoded(self, writes: Writes) -> Writes:
        """The writes as the back end keeps them, if it can keep them; nothing is changed yet."""
        return writes

    @abstractmethod
    def _apply_rollout(self, rollout: Any) -> None: ...

    @abstractmethod
    def _apply_attempts(self, rollout_id: str, attempts: list[Attempt]) -> None: ...

    @abstractmethod
    def _apply_spans(self, rollout_attempt: tuple[str, int], added: AddedSpans) -> None: ...

    @abstractmethod
    def _apply_due(self, rollout_id: str, due: float | None) -> None: ...

    @abstractmethod
    def _apply_metrics(self, point: Any) -> None: ...

    def _apply_sequence(self, rollout_id: str, sequence_id: int) -> None:
        self._sequences[rollout_id] = sequence_id

    def _apply_record(self, kind: Any, key: str, record: Any) -> None:
        self._records[kind][key] = record

    def discard(self) -> None:
        """The operation failed: forget what it wrote."""
        self.writes.clear()
        del self.notices[self._applied_notices :]

    @abstractmethod
    def spill(self) -> None:
        """The operation, which has a transaction of its own, has much to write: some of it may be applied already."""

    def take_notices(self) -> list[NoticeFields]:
        """Notices to be published, after a commit."""
        notices, self.notices, self._applied_notices = self.notices, [], 0
        self.cursor += len(notices)
        return notices

    # ------------------------------------------------------------------ records

    def find(self, rollout_id: str) -> Entry | None:
        """The entry of a rollout, if there is one."""
        return self.entries.get(rollout_id)

    def get(self, kind: type[KeyedT], key: str) -> KeyedT | None:
        """The record of that id; open spans may be gone when their attempt is over."""
        if self.writes and (record := self.writes.get((kind, key))) is not None:
            return record  # type: ignore[no-any-return] # it is of the kind that was asked for
        if kind is Rollout:
            entry = self.entries.get(key) or self.find(key)
            return None if entry is None else entry.rollout  # type: ignore[return-value] # as above
        return self._get_record(kind, key)  # type: ignore[no-any-return] # as above

    def _get_record(self, kind: type, key: str) -> Any:
        return self._records[kind].get(key)

    def put(self, record: Record) -> None:
        """Insert or replace. An attempt replaces that of its number, or is appended if its number is the next one; a
        metric point is always appended; a rollout whose status is none of the queue leaves the queue."""
        kind = type(record)  # not isinstance, which for models of pydantic is a call of Python
        if kind is Rollout:
            self.writes[kind, record.rollout_id] = record  # type: ignore[union-attr] # as its kind says
        elif kind is Attempt:
            self._put_attempt(record)  # type: ignore[arg-type] # as above
        else:
            self.writes[kind, getattr(record, RECORD_KEYS[kind]) if kind in RECORD_KEYS else id(record)] = record

    def _put_attempt(self, attempt: Attempt) -> None:
        attempts = self.writes.get((Attempt, attempt.rollout_id))
        if attempts is None:
            entry = self.entries.get(attempt.rollout_id) or self.find(attempt.rollout_id)
            attempts = self.writes[Attempt, attempt.rollout_id] = [] if entry is None else entry.attempts.copy()
        if attempt.sequence_id == len(attempts) + 1:
            attempts.append(attempt)
        else:
            attempts[attempt.sequence_id - 1] = attempt

    @abstractmethod
    def select(
        self, kind: type[SelectedT], selection: Selection, of: str | Attempt | None = None
    ) -> PaginatedResult[SelectedT]:
        """Records in the order of their insertion unless sorted.

        Args:
            of: For spans the id of their rollout, or their attempt; for metric points the id of their run.
        """

    # ------------------------------------------------------------------ attempts and spans

    def get_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        """All attempts of a rollout, the first one first; empty if there is no such rollout."""
        if self.writes and (attempts := self.writes.get((Attempt, rollout_id))) is not None:
            return attempts  # type: ignore[no-any-return] # as they were put
        entry = self.entries.get(rollout_id) or self.find(rollout_id)
        return () if entry is None else entry.attempts

    @abstractmethod
    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float | None) -> None:
        """Keep copies of spans of an attempt, all or, beyond its quota, none.

        Args:
            now: The attempt's `last_heartbeat_time` from now on; None if they are no sign of life.
        """

    def _add_spans(
        self, attempt: Attempt, spans: Sequence[Span], rows: list[tuple[Any, ...]], size: int, now: float | None
    ) -> None:
        """Note what is appended, of this size altogether, within the attempt's quota."""
        key, limits, writes = (Span, (attempt.rollout_id, attempt.sequence_id)), self.limits, self.writes
        added = writes.get(key) if writes else None
        count, used = self._usage_of(attempt) if added is None else added[2]
        count, used = count + len(spans), used + size
        if count > limits.attempt_spans or used > limits.attempt_bytes:
            raise QuotaExceeded(
                f"Attempt '{attempt.attempt_id}' of rollout '{attempt.rollout_id}' would exceed its quota of "
                f"{limits.attempt_spans} spans and {limits.attempt_bytes} bytes; write less, or raise "
                "max_attempt_spans or max_attempt_bytes of the store."
            )
        if added is not None:
            spans, rows = [*added[0], *spans], added[1] + rows
        writes[key] = spans, rows, (count, used), now

    def _usage_of(self, attempt: Attempt) -> tuple[int, int]:
        """Spans of an attempt, and their bytes."""
        entry = self.entries.get(attempt.rollout_id)
        return _NO_USAGE if entry is None else entry.usage.get(attempt.sequence_id, _NO_USAGE)

    @abstractmethod
    def has_span(self, attempt: Attempt, span_id: str) -> bool: ...

    def get_last_sequence(self, rollout_id: str) -> int:
        """The highest sequence id seen or given for a rollout, known or not; 0 at first."""
        last = self.writes.get((SEQUENCE, rollout_id))
        return self._stored_sequence(rollout_id) if last is None else last

    def _stored_sequence(self, rollout_id: str) -> int:
        return self._sequences.get(rollout_id, 0)

    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        """Remember a sequence id that was given out and that no span may ever show."""
        self.writes[SEQUENCE, rollout_id] = sequence_id

    # ------------------------------------------------------------------ queue

    def push(self, rollout_id: str) -> None:
        """Put a rollout at the tail of the queue, unless it is queued already."""
        self.writes[PUSHED, rollout_id] = None

    def pop(self, limit: int) -> Sequence[str]:
        """Take up to `limit` rollouts from the head of the queue; none, if it is empty."""
        writes = self.writes
        taken = self._head(limit)
        if len(taken) < limit and writes:  # what the operation itself has queued, at the tail
            own = [rollout_id for kind, rollout_id in writes if kind is PUSHED][: limit - len(taken)]
            taken += [rollout_id for rollout_id in own if writes.pop((PUSHED, rollout_id), True) is None]
        for rollout_id in taken:
            writes[POPPED, rollout_id] = None
        return taken

    def _head(self, limit: int) -> list[str]:
        """The first of the queue, without those that the operation has popped."""
        queued: Iterable[str] = self._queue
        if self.writes:
            queued = (rollout_id for rollout_id in queued if (POPPED, rollout_id) not in self.writes)
        return list(itertools.islice(queued, limit))

    def _apply_popped(self, rollout_id: str) -> None:
        if (entry := self.find(rollout_id)) is not None and entry.position is not None:
            self._leave_queue(entry)

    def _apply_pushed(self, rollout_id: str) -> None:
        entry = self.find(rollout_id)
        if entry is not None and entry.position is None and is_queuing(entry.rollout):
            self._enter_queue(entry)

    def _leave_queue(self, entry: Entry) -> None:
        self._queue.pop(entry.rollout.rollout_id, None)
        entry.position = None

    @abstractmethod
    def _enter_queue(self, entry: Entry) -> None:
        """Give a rollout the place behind the tail of the queue."""

    @abstractmethod
    def queue_ids(self) -> Sequence[str]:
        """The whole queue, its head first."""

    # ------------------------------------------------------------------ schedule of the watchdog, notices, counts

    def schedule(self, rollout_id: str, due: float | None) -> None:
        """Have the watchdog look at a rollout after that moment; None takes it off the schedule."""
        self.writes[DUE, rollout_id] = due

    @abstractmethod
    def overdue(self, now: float) -> Sequence[str]:
        """Rollouts whose moment lies before `now`, the earliest first."""

    def note(
        self,
        kind: NoticeKind,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        status: str | None = None,
        name: str | None = None,
        number: int | None = None,
    ) -> None:
        """Have subscribers told of a change once this transaction is committed (see `Notice`)."""
        cursor = self.cursor + len(self.notices) + 1
        self.notices.append((kind, cursor, rollout_id, attempt_id, status, name, number))

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Numbers of everything kept, under the names of `LightningStoreStatistics`."""
