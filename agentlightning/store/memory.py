"""The memory store: everything on dictionaries, under one lock.

It is safe to use from any number of threads and event loops. When spans outgrow the eviction threshold, the spans of
whole rollouts are dropped, of finished ones before others and of the oldest first, until the safe threshold holds
again. Rollouts themselves are never dropped; a warning tells when they alone outgrow the threshold.
"""

import heapq
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from agentlightning.errors import ConfigurationError, SpansEvicted, StoreUnavailable
from agentlightning.store.base import LightningStoreStatistics
from agentlightning.store.behaviour.spans import get_many_span_sequence_ids
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS, WORKING_STATUSES, is_finished, is_queuing
from agentlightning.store.local import (
    DEFAULT_MAX_ATTEMPT_BYTES,
    DEFAULT_MAX_ATTEMPT_SPANS,
    Call,
    Clock,
    LocalStore,
    Watchdog,
    execute,
)
from agentlightning.store.local import DEFAULT_MAX_SPAN_BYTES as DEFAULT_MAX_SPAN_BYTES
from agentlightning.store.notices import NoticeBoard, NoticeFields
from agentlightning.store.selection import Selection, choose, index_reader
from agentlightning.store.transaction import (
    AddedSpans,
    Entry,
    OpenSpans,
    SelectedT,
    StoreLimits,
    Transaction,
)
from agentlightning.store.values import check_json_size, span_as_json, span_of_json, weigh_rollout
from agentlightning.types import Attempt, MetricPoint, PaginatedResult, ResourcesUpdate, Rollout, Run, Span, Worker
from agentlightning.utils.metrics import MetricsBackend
from agentlightning.utils.system_snapshot import container_memory_limits

__all__ = ["InMemoryLightningStore", "estimate_model_size"]

DEFAULT_EVICTION_RATIO = 0.7
SAFE_SHARE_OF_EVICTION = 0.8
BYTES_BESIDE_A_SPAN = 400
"""What a span takes besides its JSON: its id, its numbers, its places in a list and a set, and its notice."""

logger = logging.getLogger(__name__)


def estimate_model_size(obj: object) -> int:
    """Bytes an object takes with what hangs on it."""
    if isinstance(obj, BaseModel):
        return sys.getsizeof(obj) + sum(map(estimate_model_size, obj.__dict__.values()))
    if isinstance(obj, Mapping):
        return sys.getsizeof(obj) + sum(map(estimate_model_size, obj)) + sum(map(estimate_model_size, obj.values()))
    if isinstance(obj, (list, tuple, set)):
        return sys.getsizeof(obj) + sum(map(estimate_model_size, obj))
    return sys.getsizeof(obj)


def _detect_total_memory_bytes(root: Path = Path("/")) -> int:
    """Memory of this machine, or of this container if that is less; `root` is for tests."""
    import psutil  # here: most programs that load this module use another store

    return min([psutil.virtual_memory().total, *container_memory_limits(root)])


def _threshold_bytes(name: str, value: float | int, total: int, *, least: int) -> int:
    """A float is a share of this machine's memory, an int a number of bytes."""
    if isinstance(value, float):
        if not (0.0 < value <= 1.0 or (least == 0 and value == 0.0)):
            raise ConfigurationError(f"{name} is {value}; as a share of memory it must lie between 0 and 1.")
        return int(total * value)
    if isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name} is {value}; as a number of bytes it must be at least {least}.")
    return value


# ---------------------------------------------------------------------- transactions


@dataclass(slots=True, eq=False)
class MemoryEntry(Entry):
    """A rollout with its spans, and what they take."""

    spans: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Of each span the number of its attempt, its sequence id, and its JSON."""
    span_bytes: int = 0
    rollout_bytes: int = 0
    is_evicted: bool = False


class MemoryTransaction(Transaction):
    """All state of a memory store, and the operation that is at work on it."""

    entries: dict[str, MemoryEntry]

    def __init__(self, limits: StoreLimits, span_size_estimator: Callable[[Span], int] | None) -> None:
        super().__init__(limits)
        self.entries = {}
        self.span_bytes = 0
        self.rollout_bytes = 0
        """What all rollouts take, with their inputs, metadata and outputs, and without their spans."""
        self._span_size_estimator = span_size_estimator
        self.due_heap: list[tuple[float, str]] = []
        """Moments by rollout, the earliest first; may hold some that no longer count. Empty if nothing is scheduled."""
        self._metrics: dict[str, dict[int, list[MetricPoint]]] = {}

    # ------------------------------------------------------------------ writes

    def spill(self) -> None:
        """Nothing is applied early, because what this store is to hold fits into memory twice."""

    def _apply_rollout(self, rollout: Rollout) -> None:
        entry = self.entries.get(rollout.rollout_id)
        if entry is None:
            entry = MemoryEntry(rollout, len(self.entries))
            self._weigh(entry)
            self.entries[rollout.rollout_id] = entry
            return
        before, entry.rollout = entry.rollout, rollout
        if entry.position is not None and not is_queuing(rollout):
            self._leave_queue(entry)
        if (
            rollout.input is not before.input
            or rollout.metadata is not before.metadata
            or rollout.output is not before.output
        ):
            self._weigh(entry)

    def _weigh(self, entry: MemoryEntry) -> None:
        self.rollout_bytes -= entry.rollout_bytes
        entry.rollout_bytes = weigh_rollout(entry.rollout)
        self.rollout_bytes += entry.rollout_bytes

    def _apply_attempts(self, rollout_id: str, attempts: list[Attempt]) -> None:
        entry = self.entries[rollout_id]
        entry.attempts = attempts
        if (open_spans := self._records[OpenSpans]) and attempts[-1].status not in WORKING_STATUSES:
            open_spans.pop(rollout_id, None)

    def _apply_due(self, rollout_id: str, due: float | None) -> None:
        entry = self.entries[rollout_id]
        if entry.due != due:
            entry.due = due
            if due is not None:
                heapq.heappush(self.due_heap, (due, rollout_id))

    def _apply_metrics(self, point: MetricPoint) -> None:
        self._metrics.setdefault(point.run_id, {}).setdefault(point.step, []).append(point)

    def _apply_spans(self, rollout_attempt: tuple[str, int], added: AddedSpans) -> None:
        rollout_id, number = rollout_attempt
        spans, rows, usage, now = added
        entry = self.entries[rollout_id]
        span_ids = [span.span_id for span in spans]
        known = entry.span_ids.get(number)
        if known is None:
            entry.span_ids[number] = set(span_ids)
        else:
            known.update(span_ids)
        last = max([span.sequence_id for span in spans])
        if last > self._sequences.get(rollout_id, 0):
            self._sequences[rollout_id] = last
        size = usage[1] - entry.usage.get(number, (0, 0))[1]
        entry.usage[number] = usage
        entry.spans += rows
        entry.span_bytes += size
        self.span_bytes += size
        if now is not None:  # in place: nobody else has this object, and spans are many
            entry.attempts[number - 1].__dict__["last_heartbeat_time"] = now

    # ------------------------------------------------------------------ selections

    def select(
        self, kind: type[SelectedT], selection: Selection, of: str | Attempt | None = None
    ) -> PaginatedResult[SelectedT]:
        records: Iterable[Any]
        if kind is Rollout:
            return cast("PaginatedResult[SelectedT]", self._select_rollouts(selection))
        if kind is Span:
            return cast("PaginatedResult[SelectedT]", self._select_spans(selection, of))
        if kind is MetricPoint:
            by_step = self._metrics.get(str(of), {})
            exact = [condition.value for condition in selection.conditions if condition.field == "step"]
            records = [point for step in exact or sorted(by_step) for point in by_step.get(step, ())]
        else:
            records = self._records[kind].values()
        return choose(records, selection)

    def _select_rollouts(self, selection: Selection) -> PaginatedResult[Rollout]:
        for condition in selection.conditions if selection.filter_logic == "and" else ():
            if condition.field == "rollout_id" and condition.kind == "within":  # no others can match
                named = [self.entries[key] for key in condition.value if key in self.entries]
                few = choose(sorted(named, key=lambda entry: entry.number), selection, _reader)
                return selection.page([entry.rollout for entry in few.items], few.total)
        page = choose(self.entries.values(), selection, _reader)
        return selection.page([entry.rollout for entry in page.items], page.total)

    # ------------------------------------------------------------------ spans

    def append_spans(self, attempt: Attempt, spans: Sequence[Span], now: float | None) -> None:
        number, size = attempt.sequence_id, 0
        rows: list[tuple[int, int, bytes]] = []
        for span in spans:
            body = span_as_json(span)
            weight = len(body)
            check_json_size(span, weight, self.limits.span_bytes)
            # A copy, because orjson leaves a block of six times the size to what it wrote.
            rows.append((number, span.sequence_id, bytes(memoryview(body))))
            if self._span_size_estimator is None:
                size += weight + BYTES_BESIDE_A_SPAN
            else:
                size += max(0, self._span_size_estimator(span))
        self._add_spans(attempt, spans, rows, size, now)

    def has_span(self, attempt: Attempt, span_id: str) -> bool:
        return span_id in self.entries[attempt.rollout_id].span_ids.get(attempt.sequence_id, ())

    def _select_spans(self, selection: Selection, of: str | Attempt | None) -> PaginatedResult[Span]:
        rollout_id = of.rollout_id if isinstance(of, Attempt) else str(of)
        entry = self.entries.get(rollout_id)
        if entry is None:
            return selection.page([], 0)
        if entry.is_evicted:
            raise SpansEvicted(
                f"Spans of rollout '{rollout_id}' were dropped to save memory; "
                "raise eviction_memory_threshold or use the SQLite store."
            )
        number = of.sequence_id if isinstance(of, Attempt) else None
        rows = [row for row in entry.spans if number is None or row[0] == number]
        if selection.conditions or selection.sort_by not in ("sequence_id", None):
            return choose([span_of_json(body) for _, _, body in rows], selection)
        # A page is chosen by what is known beside the spans, so that no others are decoded.
        page = choose(rows, selection, lambda field: operator.itemgetter(1))
        return selection.page([span_of_json(body) for _, _, body in page.items], page.total)

    def evict_spans(self, entry: MemoryEntry) -> None:
        """Drop all spans of a rollout."""
        self.span_bytes -= entry.span_bytes
        entry.span_bytes = 0
        entry.spans = []
        entry.span_ids = {}
        entry.is_evicted = True

    # ------------------------------------------------------------------ queue and schedule

    def _enter_queue(self, entry: Entry) -> None:
        entry.position = self._queue[entry.rollout.rollout_id] = 0  # whose order is that of the queue

    def queue_ids(self) -> Sequence[str]:
        return list(self._queue)

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


def _reader(field: str) -> Callable[[MemoryEntry], Any]:
    if field in Rollout.model_fields and field != "input":
        return operator.attrgetter(f"rollout.{field}")
    return index_reader(field, operator.attrgetter("rollout"), operator.attrgetter("latest"))


# ---------------------------------------------------------------------- the store


def _closed() -> StoreUnavailable:
    return StoreUnavailable("This memory store is closed; make another InMemoryLightningStore.")


class InMemoryLightningStore(LocalStore):
    """A store that lives and dies with its process."""

    _is_quick = True

    def __init__(
        self,
        *,
        thread_safe: bool = True,
        eviction_memory_threshold: float | int | None = None,
        safe_memory_threshold: float | int | None = None,
        span_size_estimator: Callable[[Span], int] | None = None,
        tracker: MetricsBackend | None = None,
        scan_debounce_seconds: float = 0.0,
        lost_worker_seconds: float = LOST_WORKER_SECONDS,
        max_span_bytes: int = DEFAULT_MAX_SPAN_BYTES,
        max_attempt_bytes: int = DEFAULT_MAX_ATTEMPT_BYTES,
        max_attempt_spans: int = DEFAULT_MAX_ATTEMPT_SPANS,
        clock: Clock | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            thread_safe: Accepted and ignored; this store is always thread-safe.
            eviction_memory_threshold: Spans above this are dropped; a share of memory (float) or bytes (int).
            safe_memory_threshold: Dropping stops at or below this; by default four fifths of the other threshold.
            span_size_estimator: Bytes of one span; by default the length of its JSON and what it takes besides.
            tracker: Measures every operation.
            scan_debounce_seconds: Least time between two looks of the watchdog.
            lost_worker_seconds: How long a worker with heartbeats may be silent until what it claimed is given back.
            max_span_bytes: Largest span that is accepted, as JSON.
            max_attempt_bytes: How much the spans of one attempt may take; further ones are refused.
            max_attempt_spans: How many spans one attempt may have; further ones are refused.
            clock: Seconds since the epoch; for tests.
        """
        super().__init__(
            max_span_bytes=max_span_bytes,
            max_attempt_bytes=max_attempt_bytes,
            max_attempt_spans=max_attempt_spans,
            tracker=tracker,
            scan_debounce_seconds=scan_debounce_seconds,
            lost_worker_seconds=lost_worker_seconds,
            clock=clock,
        )
        self._total_memory_bytes = _detect_total_memory_bytes()
        eviction = DEFAULT_EVICTION_RATIO if eviction_memory_threshold is None else eviction_memory_threshold
        self._eviction_threshold_bytes = _threshold_bytes(
            "eviction_memory_threshold", eviction, self._total_memory_bytes, least=1
        )
        if safe_memory_threshold is None:
            self._safe_threshold_bytes = int(self._eviction_threshold_bytes * SAFE_SHARE_OF_EVICTION)
        else:
            self._safe_threshold_bytes = _threshold_bytes(
                "safe_memory_threshold", safe_memory_threshold, self._total_memory_bytes, least=0
            )
        if not 0 <= self._safe_threshold_bytes < self._eviction_threshold_bytes:
            raise ConfigurationError(
                f"safe_memory_threshold ({self._safe_threshold_bytes} bytes) must be below "
                f"eviction_memory_threshold ({self._eviction_threshold_bytes} bytes)."
            )
        self._lock = threading.Lock()  # protects `_tx`; held for one transaction, never across an await
        self._tx = MemoryTransaction(self._limits, span_size_estimator)
        self._is_closed = False
        self._has_warned = False

    async def close(self) -> None:
        """Refuse all further work; whoever waits is told. What the store holds goes with it."""
        with self._lock:
            self._is_closed = True
        self._board.wake_everyone()

    def number_at_once(self, rollout_ids: Sequence[str]) -> Sequence[int]:
        with self._lock:
            numbers = get_many_span_sequence_ids(self._tx, 0.0, [(rollout_id, "") for rollout_id in rollout_ids])
            self._tx.apply()
            return numbers

    def _run_at_once(self, call: Call) -> object:
        with self._lock:
            if self._is_closed:
                raise _closed()
            now = self._clock()
            if call.watchdog and self._tx.due_heap:
                look = self._watch.look(self._tx.earliest_due(), now)
                if look is not None:
                    self._transact(look, now)
            return self._transact(call, now)

    async def _run_write(self, call: Call) -> object:
        return self._run_at_once(call)

    _run_read = _run_write

    def _transact(self, call: Call, now: float) -> object:
        tx, board = self._tx, self._board
        due = tx.earliest_due() if tx.due_heap and board.has_waiters else None
        result = execute(call, tx, now)
        if tx.notices:
            board.publish(tx.take_notices())
        if tx.span_bytes > self._eviction_threshold_bytes:
            self._evict()
        if tx.rollout_bytes > self._eviction_threshold_bytes and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The inputs and metadata of %d rollouts take about %d bytes, above eviction_memory_threshold=%d; they "
                "are never dropped. Store large inputs elsewhere and keep a reference, or use a SqliteLightningStore.",
                len(tx.entries),
                tx.rollout_bytes,
                self._eviction_threshold_bytes,
            )
        if tx.due_heap and board.has_waiters:
            earliest = tx.earliest_due()
            if earliest is not None and (due is None or earliest < due):
                board.wake_everyone()
        return result

    def _evict(self) -> None:
        """Drop spans of finished rollouts, then of others, the oldest first, until the safe threshold holds."""
        tx = self._tx
        holding = [entry for entry in tx.entries.values() if entry.spans]
        for entry in sorted(holding, key=lambda entry: (not is_finished(entry.rollout), entry.rollout.start_time)):
            if tx.span_bytes <= self._safe_threshold_bytes:
                return
            tx.evict_spans(entry)

    def _next_due(self) -> float | None:
        with self._lock:
            return self._tx.earliest_due()

    async def _notices_after(self, cursor: int) -> Sequence[NoticeFields] | None:
        notices = self._board.after(cursor)
        if not notices and self._is_closed:
            raise _closed()
        return notices

    async def statistics(self) -> LightningStoreStatistics:
        statistics = await super().statistics()
        statistics["total_rollout_bytes"] = self._tx.rollout_bytes
        statistics["eviction_threshold_bytes"] = self._eviction_threshold_bytes
        statistics["safe_threshold_bytes"] = self._safe_threshold_bytes
        statistics["memory_capacity_bytes"] = self._total_memory_bytes
        return statistics

    def __getstate__(self) -> dict[str, object]:
        """Data travels to another process; locks, waiters and the tracker stay behind."""
        with self._lock:
            state = dict(self.__dict__)
        state["_board"] = self._board.cursor
        state["_tracker"] = None
        state["_watch"] = self._watch.debounce_seconds
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._board = NoticeBoard()
        self._board.start_at(state["_board"])
        self._watch = Watchdog(state["_watch"], self._clock(), self._is_scheduled)
