"""The working set: what a transaction has at hand, how to undo what an operation did to it, and what is to be told.

A rollout lies in an entry together with what hangs on it. The memory store's set holds everything and never lets go of
it; a set on a database loads entries when they are met, holds changed rows back until they are flushed, and may forget
entries in between. Every write leaves behind how to undo it, so that a behaviour that raises leaves nothing.
"""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agentlightning.errors import QuotaExceeded
from agentlightning.store.lifecycle import is_queuing
from agentlightning.store.notices import NoticeFields
from agentlightning.store.transaction import KeyedT, OpenSpans, Record, Setting, StoreLimits, Transaction
from agentlightning.types import Attempt, MetricPoint, ResourcesUpdate, Rollout, Run, Worker

RECORD_KEYS: dict[type, str] = {
    ResourcesUpdate: "resources_id",
    Worker: "worker_id",
    Run: "run_id",
    Setting: "name",
    OpenSpans: "rollout_id",
}
_MISSING: Any = object()


@dataclass(slots=True, eq=False)
class Entry:
    """A rollout with what hangs on it."""

    rollout: Rollout
    number: int
    """Order of insertion."""
    attempts: list[Attempt] = field(default_factory=list)
    span_ids: dict[int, set[str]] = field(default_factory=dict)
    """Ids of the spans of an attempt, by its number; an attempt may be missing where a database knows them."""
    usage: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Spans of an attempt and their bytes, by its number; as `span_ids`."""
    position: int | None = None
    """Place in the queue."""
    due: float | None = None
    """When the watchdog must look at it."""

    @property
    def latest(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


EntryT = TypeVar("EntryT", bound=Entry)


class WorkingSet(Transaction, Generic[EntryT]):
    """Entries, records, the queue, notices, and how to undo what was done to them."""

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.notices: list[NoticeFields] = []
        self._kept_notices = 0
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._remember_nothing()

    def _remember_nothing(self) -> None:
        self.entries: dict[str, EntryT] = {}
        self._records: dict[type, dict[str, Any]] = {kind: {} for kind in RECORD_KEYS}
        self._sequences: dict[str, int] = {}
        self._queue: OrderedDict[str, int] = OrderedDict()  # id -> position: the head, in the order of positions

    # ------------------------------------------------------------------ the end of an operation

    def keep(self) -> None:
        """The operation is done; what it wrote stays."""
        self._undo.clear()
        self._kept_notices = len(self.notices)

    def take_back(self) -> None:
        """The operation failed; what it wrote goes, the last write first."""
        del self.notices[self._kept_notices :]
        while self._undo:
            undo, arguments = self._undo.pop()
            undo(*arguments)

    def take_notices(self) -> list[NoticeFields]:
        """After a commit: what is to be told."""
        notices = self.notices
        if notices:
            self.notices = []
            self._kept_notices = 0
            self.cursor += len(notices)
        return notices

    def _set(self, mapping: dict[Any, Any], key: object, value: object) -> None:
        """Put into a dictionary, unless the operation fails."""
        self._undo.append((_restore, (mapping, key, mapping.get(key, _MISSING))))
        mapping[key] = value

    # ------------------------------------------------------------------ records

    def find(self, rollout_id: str) -> EntryT | None:
        """The entry of a rollout, if there is one."""
        return self.entries.get(rollout_id)

    def known(self, rollout_id: str) -> EntryT:
        """The entry of a rollout, which there must be."""
        entry = self.entries.get(rollout_id) or self.find(rollout_id)
        if entry is None:
            raise KeyError(rollout_id)
        return entry

    def get(self, kind: type[KeyedT], key: str) -> KeyedT | None:
        if kind is Rollout:
            entry = self.entries.get(key) or self.find(key)
            rollout: Any = None if entry is None else entry.rollout
            return rollout  # type: ignore[no-any-return] # it is of the kind that was asked for
        return self._get_record(kind, key)

    def _get_record(self, kind: type[KeyedT], key: str) -> KeyedT | None:
        record: KeyedT | None = self._records[kind].get(key)
        return record

    def put(self, record: Record) -> None:
        # Not isinstance, which for models of pydantic is a call of Python.
        if type(record) is Attempt:
            self._put_attempt(self.known(record.rollout_id), record)
        elif type(record) is Rollout:
            entry = self._put_rollout(record)
            if entry.position is not None and not is_queuing(record):
                self._leave_queue(entry)
        elif type(record) is MetricPoint:
            self._put_metrics(record)
        else:
            self._put_record(record)

    @abstractmethod
    def _put_rollout(self, rollout: Rollout) -> EntryT: ...

    @abstractmethod
    def _put_metrics(self, point: MetricPoint) -> None: ...

    def _put_record(self, record: object) -> None:
        kind = type(record)
        self._set(self._records[kind], getattr(record, RECORD_KEYS[kind]), record)

    # ------------------------------------------------------------------ attempts and sequence ids

    def get_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        entry = self.entries.get(rollout_id) or self.find(rollout_id)
        return () if entry is None else entry.attempts

    def _put_attempt(self, entry: EntryT, attempt: Attempt) -> None:
        attempts, index = entry.attempts, attempt.sequence_id - 1
        if index == len(attempts):
            self._undo.append((attempts.pop, ()))
            attempts.append(attempt)
            self._set(entry.span_ids, attempt.sequence_id, set())
        else:
            self._undo.append((attempts.__setitem__, (index, attempts[index])))
            attempts[index] = attempt

    def _check_quota(self, attempt: Attempt, count: int, size: int) -> None:
        """Refuse spans that would give an attempt so many, with so many bytes."""
        limits = self.limits
        if count > limits.attempt_spans or size > limits.attempt_bytes:
            raise QuotaExceeded(
                f"Attempt '{attempt.attempt_id}' of rollout '{attempt.rollout_id}' would exceed its quota of "
                f"{limits.attempt_spans} spans and {limits.attempt_bytes} bytes; write less, or raise "
                "max_attempt_spans or max_attempt_bytes of the store."
            )

    def get_last_sequence(self, rollout_id: str) -> int:
        return self._sequences.get(rollout_id, 0)

    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        self._set(self._sequences, rollout_id, sequence_id)

    # ------------------------------------------------------------------ queue

    def push(self, rollout_id: str) -> None:
        entry = self.known(rollout_id)
        if entry.position is not None:
            return
        position = self._new_position()
        self._move(entry, position)
        if self._is_queue_at_hand():
            self._queue[rollout_id] = position

    def pop(self, limit: int) -> Sequence[str]:
        popped: list[str] = []
        while len(popped) < limit:
            if not self._queue:
                self._read_queue()
            if not self._queue:
                break
            rollout_id, _ = self._queue.popitem(last=False)
            self._move(self.known(rollout_id), None)
            popped.append(rollout_id)
        return popped

    def _leave_queue(self, entry: EntryT) -> None:
        self._queue.pop(entry.rollout.rollout_id, None)
        self._move(entry, None)

    def _move(self, entry: EntryT, position: int | None) -> None:
        self._undo.append((self._restore_position, (entry, entry.position)))
        entry.position = position

    @abstractmethod
    def _restore_position(self, entry: EntryT, position: int | None) -> None:
        """Undo a move."""

    @abstractmethod
    def _new_position(self) -> int:
        """A place behind the tail of the queue."""

    def _is_queue_at_hand(self) -> bool:
        """Whether `_queue` is the whole queue, and not only its head."""
        return True

    def _read_queue(self) -> None:
        """Fill `_queue`, which is empty, with the head of the queue."""


def _restore(mapping: dict[object, object], key: object, value: object) -> None:
    if value is _MISSING:
        mapping.pop(key, None)
    else:
        mapping[key] = value
