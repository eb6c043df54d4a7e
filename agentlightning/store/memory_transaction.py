"""Transactions on dictionaries, for the memory store.

Every write leaves behind how to undo it, so that a behaviour that raises leaves nothing. The store holds its lock
around each transaction; nothing here locks.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from agentlightning.store.claims import GRANT_SECONDS, Grant
from agentlightning.store.lifecycle import WORKING_STATUSES
from agentlightning.store.notices import NoticeFields
from agentlightning.store.selection import Selection, choose
from agentlightning.store.transaction import Record, RecordT, Transaction
from agentlightning.store.values import check_size, copied_span, replaced, weigh_rollout, weigh_span
from agentlightning.types import (
    Attempt,
    MetricPoint,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    Run,
    Span,
    Worker,
)

__all__ = ["Entry", "MemoryTransaction"]

RECORD_KEYS: dict[type, str] = {
    ResourcesUpdate: "resources_id",
    Worker: "worker_id",
    Run: "run_id",
    Grant: "grant_id",
}


class Entry:
    """A rollout with everything that hangs on it."""

    __slots__ = (
        "attempts",
        "bytes",
        "is_evicted",
        "number",
        "open_spans",
        "rollout",
        "rollout_bytes",
        "span_ids",
        "spans",
    )

    def __init__(self, rollout: Rollout, number: int) -> None:
        self.rollout = rollout
        self.number = number
        """Order of insertion."""
        self.attempts: list[Attempt] = []
        self.spans: list[Span] = []
        self.span_ids: set[str] = set()
        """Attempt id and span id, joined, of every span ever kept."""
        self.open_spans: Sequence[Span] = ()
        """Spans that had begun and not ended when they were put."""
        self.bytes = 0
        """What the spans take."""
        self.rollout_bytes = 0
        self.is_evicted = False


class MemoryTransaction(Transaction):
    """All state of a memory store, and the transaction that is open on it."""

    def __init__(self, *, max_span_bytes: int) -> None:
        self.entries: dict[str, Entry] = {}
        self.span_bytes = 0
        self.rollout_bytes = 0
        """What all rollouts take, with their inputs, metadata and outputs, and without their spans."""
        self.span_size_estimator: Callable[[Span], int] | None = None
        """Replaces our own estimate of a span's size."""
        self._max_span_bytes = max_span_bytes
        self._sequences: dict[str, int] = {}
        self._queue: OrderedDict[str, int] = OrderedDict()  # rollout id -> position, in the order of positions
        self._tail = 0
        self._head = 0
        self._due: dict[str, float] = {}
        self.due_heap: list[tuple[float, str]] = []
        """Moments by rollout, the earliest first; may hold some that no longer count. Empty if nothing is scheduled."""
        self._records: dict[type, dict[str, Any]] = {kind: {} for kind in RECORD_KEYS}
        self._settings: dict[str, str] = {}
        self._metrics: dict[str, list[MetricPoint]] = {}
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.notices: list[NoticeFields] = []
        self.cursor = 0  # number of the newest committed notice

    # ------------------------------------------------------------------ the transaction

    def commit(self) -> list[NoticeFields]:
        """Keep what was written; returns what is to be told."""
        notices, self.notices = self.notices, []
        self.cursor += len(notices)
        self._undo.clear()
        return notices

    def rollback(self) -> None:
        """Take back what was written, the last write first."""
        self.notices.clear()
        while self._undo:
            undo, arguments = self._undo.pop()
            undo(*arguments)

    # ------------------------------------------------------------------ rollouts and attempts

    def get_rollout(self, rollout_id: str) -> Rollout | None:
        entry = self.entries.get(rollout_id)
        return None if entry is None else entry.rollout

    def put_rollout(self, rollout: Rollout) -> None:
        entry = self.entries.get(rollout.rollout_id)
        if entry is None:
            entry = self.entries[rollout.rollout_id] = Entry(rollout, len(self.entries))
            self._undo.append((self.entries.pop, (rollout.rollout_id,)))
            self._weigh_rollout(entry)
            return
        before, entry.rollout = entry.rollout, rollout
        self._undo.append((setattr, (entry, "rollout", before)))
        if (
            rollout.input is not before.input
            or rollout.metadata is not before.metadata
            or rollout.output is not before.output
        ):
            self._weigh_rollout(entry)

    def _weigh_rollout(self, entry: Entry) -> None:
        self._undo.append((self._set_weight, (entry, entry.rollout_bytes)))
        self._set_weight(entry, weigh_rollout(entry.rollout))

    def _set_weight(self, entry: Entry, rollout_bytes: int) -> None:
        self.rollout_bytes += rollout_bytes - entry.rollout_bytes
        entry.rollout_bytes = rollout_bytes

    def select_rollouts(self, selection: Selection) -> PaginatedResult[Rollout]:
        return choose((entry.rollout for entry in self._candidates(selection)), selection)

    def _candidates(self, selection: Selection) -> Sequence[Entry]:
        """The rollouts a selection may match: those of the ids it names, if it names any."""
        if selection.logic == "and":
            for condition in selection.conditions:
                if condition.field == "rollout_id" and condition.kind == "within":
                    named = [self.entries[key] for key in condition.value if key in self.entries]
                    return sorted(named, key=lambda entry: entry.number)
        return list(self.entries.values())

    def get_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        entry = self.entries.get(rollout_id)
        return () if entry is None else entry.attempts

    def put_attempt(self, attempt: Attempt) -> None:
        entry = self.entries[attempt.rollout_id]
        attempts = entry.attempts
        index = attempt.sequence_id - 1
        if entry.open_spans and attempt.status not in WORKING_STATUSES:
            self.put_open_spans(attempt.rollout_id, ())
        if index == len(attempts):
            attempts.append(attempt)
            self._undo.append((attempts.pop, ()))
        else:
            self._undo.append((attempts.__setitem__, (index, attempts[index])))
            attempts[index] = attempt

    def remove_latest_attempt(self, rollout_id: str) -> None:
        attempts = self.entries[rollout_id].attempts
        self._undo.append((attempts.append, (attempts.pop(),)))

    # ------------------------------------------------------------------ spans

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        entry = self.entries[attempt.rollout_id]
        for span in spans:
            self._append_span(entry, attempt, span)
        alive = replaced(attempt, last_heartbeat_time=now)
        self.put_attempt(alive)
        return alive

    def _append_span(self, entry: Entry, attempt: Attempt, span: Span) -> None:
        size = weigh_span(span)
        check_size(span, size, self._max_span_bytes)
        if self.span_size_estimator is not None:
            size = max(0, self.span_size_estimator(span))
        rollout_id = attempt.rollout_id
        key = attempt.attempt_id + span.span_id
        last_sequence = self._sequences.get(rollout_id, 0)
        self._undo.append((self._unappend, (entry, None if key in entry.span_ids else key, size, last_sequence)))
        entry.spans.append(copied_span(span))
        entry.span_ids.add(key)
        entry.bytes += size
        self.span_bytes += size
        if span.sequence_id > last_sequence:
            self._sequences[rollout_id] = span.sequence_id

    def _unappend(self, entry: Entry, key: str | None, size: int, last_sequence: int) -> None:
        entry.spans.pop()
        if key is not None:
            entry.span_ids.discard(key)
        entry.bytes -= size
        self.span_bytes -= size
        self._sequences[entry.rollout.rollout_id] = last_sequence

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        return attempt.attempt_id + span_id in self.entries[attempt.rollout_id].span_ids

    def select_spans(self, rollout_id: str, attempt: Attempt | None, selection: Selection) -> PaginatedResult[Span]:
        entry = self.entries.get(rollout_id)
        spans = [] if entry is None else entry.spans
        if attempt is not None:
            spans = [span for span in spans if span.attempt_id == attempt.attempt_id]
        return choose(spans, selection)

    def put_open_spans(self, rollout_id: str, spans: Sequence[Span]) -> None:
        entry = self.entries[rollout_id]
        self._undo.append((setattr, (entry, "open_spans", entry.open_spans)))
        entry.open_spans = tuple(spans)

    def get_open_spans(self, rollout_id: str) -> Sequence[Span]:
        entry = self.entries.get(rollout_id)
        return () if entry is None else entry.open_spans

    def are_spans_evicted(self, rollout_id: str) -> bool:
        entry = self.entries.get(rollout_id)
        return entry is not None and entry.is_evicted

    def evict_spans(self, entry: Entry) -> None:
        """Drop all spans of a rollout; not undone, so only between transactions."""
        self.span_bytes -= entry.bytes
        entry.bytes = 0
        entry.spans = []
        entry.span_ids = set()
        entry.is_evicted = True

    def get_last_sequence(self, rollout_id: str) -> int:
        return self._sequences.get(rollout_id, 0)

    def take_sequence(self, rollout_id: str) -> int:
        """The next sequence id; not undone, so only between transactions."""
        sequence_id = self._sequences[rollout_id] = self._sequences.get(rollout_id, 0) + 1
        return sequence_id

    def put_last_sequence(self, rollout_id: str, sequence_id: int) -> None:
        self._undo.append((self._sequences.__setitem__, (rollout_id, self._sequences.get(rollout_id, 0))))
        self._sequences[rollout_id] = sequence_id

    # ------------------------------------------------------------------ queue

    def push(self, rollout_id: str, *, front: bool = False) -> None:
        if rollout_id in self._queue:
            return
        self._undo.append((self._queue.pop, (rollout_id,)))
        if front:
            self._head -= 1
            self._queue[rollout_id] = self._head
            self._queue.move_to_end(rollout_id, last=False)
        else:
            self._tail += 1
            self._queue[rollout_id] = self._tail

    def pop(self, limit: int) -> Sequence[str]:
        popped: list[str] = []
        while self._queue and len(popped) < limit:
            rollout_id, position = self._queue.popitem(last=False)
            self._undo.append((self._restore_place, (rollout_id, position)))
            popped.append(rollout_id)
        return popped

    def unqueue(self, rollout_id: str) -> None:
        position = self._queue.pop(rollout_id, None)
        if position is not None:
            self._undo.append((self._restore_place, (rollout_id, position)))

    def _restore_place(self, rollout_id: str, position: int) -> None:
        places = sorted([*self._queue.items(), (rollout_id, position)], key=lambda place: place[1])
        self._queue.clear()
        self._queue.update(places)

    def queue_ids(self) -> Sequence[str]:
        return list(self._queue)

    # ------------------------------------------------------------------ schedule

    def schedule(self, rollout_id: str, due: float | None) -> None:
        before = self._due.get(rollout_id)
        if before != due:
            self._undo.append((self._set_due, (rollout_id, before)))
            self._set_due(rollout_id, due)

    def _set_due(self, rollout_id: str, due: float | None) -> None:
        if due is None:
            self._due.pop(rollout_id, None)
        else:
            self._due[rollout_id] = due
            heapq.heappush(self.due_heap, (due, rollout_id))

    def earliest_due(self) -> float | None:
        heap = self.due_heap
        while heap and self._due.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def overdue(self, now: float) -> Sequence[str]:
        found: list[tuple[float, str]] = []
        while (due := self.earliest_due()) is not None and due < now:
            found.append(heapq.heappop(self.due_heap))
        for moment in found:
            heapq.heappush(self.due_heap, moment)
        return list(dict.fromkeys(rollout_id for _, rollout_id in found))

    # ------------------------------------------------------------------ records, settings, metrics

    def get_record(self, kind: type[RecordT], key: str) -> RecordT | None:
        record: RecordT | None = self._records[kind].get(key)
        return record

    def put_record(self, record: Record) -> None:
        records = self._records[type(record)]
        key: str = getattr(record, RECORD_KEYS[type(record)])
        before = records.get(key)
        self._undo.append((records.pop, (key,)) if before is None else (records.__setitem__, (key, before)))
        records[key] = record
        if type(record) is Grant:
            while (oldest := next(iter(records.values()))).time < record.time - GRANT_SECONDS:
                del records[oldest.grant_id]

    def select_records(self, kind: type[RecordT], selection: Selection) -> PaginatedResult[RecordT]:
        return choose(self._records[kind].values(), selection)

    def get_setting(self, name: str) -> str | None:
        return self._settings.get(name)

    def put_setting(self, name: str, value: str) -> None:
        before = self._settings.get(name)
        undo = (self._settings.pop, (name,)) if before is None else (self._settings.__setitem__, (name, before))
        self._undo.append(undo)
        self._settings[name] = value

    def append_metrics(self, point: MetricPoint) -> None:
        points = self._metrics.setdefault(point.run_id, [])
        insort(points, point, key=lambda other: other.step)
        self._undo.append((points.remove, (point,)))

    def get_metrics(self, run_id: str, step: int | None = None) -> Sequence[MetricPoint]:
        points = self._metrics.get(run_id, [])
        if step is None:
            return points
        first = bisect_left(points, step, key=lambda point: point.step)
        return points[first : bisect_right(points, step, lo=first, key=lambda point: point.step)]

    def counts(self) -> dict[str, int]:
        return {
            "total_rollouts": len(self.entries),
            "total_attempts": sum(len(entry.attempts) for entry in self.entries.values()),
            "total_spans": sum(len(entry.spans) for entry in self.entries.values()),
            "total_resources": len(self._records[ResourcesUpdate]),
            "total_workers": len(self._records[Worker]),
            "total_runs": len(self._records[Run]),
            "queue_length": len(self._queue),
            "total_span_bytes": self.span_bytes,
        }
