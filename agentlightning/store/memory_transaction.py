"""Transactions on dictionaries, for the memory store, which holds its lock around each of them."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import SpansEvicted
from agentlightning.store.claims import GRANT_SECONDS, Grant
from agentlightning.store.copies import copied_span, replaced
from agentlightning.store.lifecycle import WORKING_STATUSES
from agentlightning.store.rollout_index import index_value
from agentlightning.store.selection import Selection, choose
from agentlightning.store.transaction import OpenSpans, SelectedT
from agentlightning.store.values import check_size, weigh_rollout, weigh_span
from agentlightning.store.working_set import Entry, WorkingSet
from agentlightning.types import Attempt, MetricPoint, PaginatedResult, ResourcesUpdate, Rollout, Run, Span, Worker

__all__ = ["MemoryEntry", "MemoryTransaction"]


@dataclass(slots=True, eq=False)
class MemoryEntry(Entry):
    """A rollout with its spans, and what they take."""

    spans: list[Span] = field(default_factory=list)
    span_bytes: int = 0
    rollout_bytes: int = 0
    is_evicted: bool = False


class MemoryTransaction(WorkingSet[MemoryEntry]):
    """All state of a memory store, and the transaction that is open on it."""

    def __init__(self, *, max_span_bytes: int, span_size_estimator: Callable[[Span], int] | None) -> None:
        super().__init__()
        self.span_bytes = 0
        self.rollout_bytes = 0
        """What all rollouts take, with their inputs, metadata and outputs, and without their spans."""
        self._max_span_bytes = max_span_bytes
        self._span_size_estimator = span_size_estimator
        self._tail = self._head = 0
        self.due_heap: list[tuple[float, str]] = []
        """Moments by rollout, the earliest first; may hold some that no longer count. Empty if nothing is scheduled."""
        self._metrics: dict[str, dict[int, list[MetricPoint]]] = {}

    # ------------------------------------------------------------------ records

    def _put_rollout(self, rollout: Rollout) -> MemoryEntry:
        entry = self.entries.get(rollout.rollout_id)
        if entry is None:
            entry = MemoryEntry(rollout, len(self.entries))
            self._set(self.entries, rollout.rollout_id, entry)
            self._weigh(entry)
            return entry
        before, entry.rollout = entry.rollout, rollout
        self._undo.append((setattr, (entry, "rollout", before)))
        if (
            rollout.input is not before.input
            or rollout.metadata is not before.metadata
            or rollout.output is not before.output
        ):
            self._weigh(entry)
        return entry

    def _weigh(self, entry: MemoryEntry) -> None:
        self._undo.append((self._set_rollout_bytes, (entry, entry.rollout_bytes)))
        self._set_rollout_bytes(entry, weigh_rollout(entry.rollout))

    def _set_rollout_bytes(self, entry: MemoryEntry, rollout_bytes: int) -> None:
        self.rollout_bytes += rollout_bytes - entry.rollout_bytes
        entry.rollout_bytes = rollout_bytes

    def _put_attempt(self, entry: MemoryEntry, attempt: Attempt) -> None:
        open_spans = self._records[OpenSpans]
        if open_spans and attempt.status not in WORKING_STATUSES and attempt.rollout_id in open_spans:
            self._undo.append((open_spans.__setitem__, (attempt.rollout_id, open_spans.pop(attempt.rollout_id))))
        super()._put_attempt(entry, attempt)

    def _put_record(self, record: Any) -> None:
        super()._put_record(record)
        if type(record) is Grant:
            grants = self._records[Grant]
            while (oldest := next(iter(grants.values()))).time < record.time - GRANT_SECONDS:
                del grants[oldest.grant_id]

    def _put_metrics(self, point: MetricPoint) -> None:
        points = self._metrics.setdefault(point.run_id, {}).setdefault(point.step, [])
        points.append(point)
        self._undo.append((points.pop, ()))

    def select(
        self, kind: type[SelectedT], selection: Selection, of: str | Attempt | None = None
    ) -> PaginatedResult[SelectedT]:
        records: Iterable[Any]
        if kind is Rollout:
            page = choose(self._candidates(selection), selection, _field_of)
            rollouts: Any = [entry.rollout for entry in page.items]
            return selection.page(rollouts, page.total)
        if kind is Span:
            records = self._spans_of(of)
        elif kind is MetricPoint:
            by_step = self._metrics.get(str(of), {})
            exact = [condition.value for condition in selection.conditions if condition.field == "step"]
            records = [point for step in exact or sorted(by_step) for point in by_step.get(step, ())]
        else:
            records = self._records[kind].values()
        return choose(records, selection)

    def _candidates(self, selection: Selection) -> Iterable[MemoryEntry]:
        """The rollouts a selection may match: those of the ids it names, if it names any."""
        if selection.filter_logic == "and":
            for condition in selection.conditions:
                if condition.field == "rollout_id" and condition.kind == "within":
                    named = [self.entries[key] for key in condition.value if key in self.entries]
                    return sorted(named, key=lambda entry: entry.number)
        return self.entries.values()

    # ------------------------------------------------------------------ spans

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float) -> Attempt:
        entry = self.entries[attempt.rollout_id]
        size = sum(map(self._weigh_span, spans))
        last_sequence = self._sequences.get(attempt.rollout_id, 0)
        self._undo.append((self._drop_spans, (entry, attempt, len(spans), size, last_sequence)))
        known = entry.span_ids[attempt.sequence_id]
        for span in spans:
            entry.spans.append(copied_span(span))
            known.add(span.span_id)
            if span.sequence_id > last_sequence:
                last_sequence = self._sequences[attempt.rollout_id] = span.sequence_id
        entry.span_bytes += size
        self.span_bytes += size
        alive = replaced(attempt, last_heartbeat_time=now)
        index = attempt.sequence_id - 1
        self._undo.append((entry.attempts.__setitem__, (index, entry.attempts[index])))
        entry.attempts[index] = alive
        return alive

    def _weigh_span(self, span: Span) -> int:
        size = weigh_span(span)
        check_size(span, size, self._max_span_bytes)
        return size if self._span_size_estimator is None else max(0, self._span_size_estimator(span))

    def _drop_spans(self, entry: MemoryEntry, attempt: Attempt, count: int, size: int, last_sequence: int) -> None:
        for _ in range(count):
            entry.span_ids[attempt.sequence_id].discard(entry.spans.pop().span_id)
        entry.span_bytes -= size
        self.span_bytes -= size
        self._sequences[attempt.rollout_id] = last_sequence

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        return span_id in self.entries[attempt.rollout_id].span_ids[attempt.sequence_id]

    def _spans_of(self, of: str | Attempt | None) -> list[Span]:
        rollout_id = of.rollout_id if isinstance(of, Attempt) else str(of)
        entry = self.entries.get(rollout_id)
        if entry is None:
            return []
        if entry.is_evicted:
            raise SpansEvicted(
                f"Spans of rollout '{rollout_id}' were dropped to save memory; "
                "raise eviction_memory_threshold or use the SQLite store."
            )
        if isinstance(of, Attempt):
            return [span for span in entry.spans if span.attempt_id == of.attempt_id]
        return entry.spans

    def evict_spans(self, entry: MemoryEntry) -> None:
        """Drop all spans of a rollout; not undone, so only between transactions."""
        self.span_bytes -= entry.span_bytes
        entry.span_bytes = 0
        entry.spans = []
        entry.span_ids = {number: set() for number in entry.span_ids}
        entry.is_evicted = True

    def take_sequence(self, rollout_id: str) -> int:
        """The next sequence id; not undone, so only between transactions."""
        sequence_id = self._sequences[rollout_id] = self._sequences.get(rollout_id, 0) + 1
        return sequence_id

    # ------------------------------------------------------------------ queue and schedule

    def _new_position(self, *, front: bool) -> int:
        if front:
            self._head -= 1
            return self._head
        self._tail += 1
        return self._tail

    def _restore_position(self, entry: MemoryEntry, position: int | None) -> None:
        entry.position = position
        self._queue.pop(entry.rollout.rollout_id, None)
        if position is not None:
            places = sorted([*self._queue.items(), (entry.rollout.rollout_id, position)], key=lambda place: place[1])
            self._queue.clear()
            self._queue.update(places)

    def queue_ids(self) -> Sequence[str]:
        return list(self._queue)

    def schedule(self, rollout_id: str, due: float | None) -> None:
        entry = self.entries[rollout_id]
        if entry.due != due:
            self._undo.append((self._set_due, (entry, entry.due)))
            self._set_due(entry, due)

    def _set_due(self, entry: MemoryEntry, due: float | None) -> None:
        entry.due = due
        if due is not None:
            heapq.heappush(self.due_heap, (due, entry.rollout.rollout_id))

    def earliest_due(self) -> float | None:
        heap = self.due_heap
        while heap and ((entry := self.entries.get(heap[0][1])) is None or entry.due != heap[0][0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def overdue(self, now: float) -> Sequence[str]:
        found: list[tuple[float, str]] = []
        while (due := self.earliest_due()) is not None and due < now:
            found.append(heapq.heappop(self.due_heap))
        for moment in found:
            heapq.heappush(self.due_heap, moment)
        return list(dict.fromkeys(rollout_id for _, rollout_id in found))

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


def _field_of(entry: MemoryEntry, field: str) -> Any:
    return index_value(entry.rollout, entry.attempts[-1] if entry.attempts else None, field)
