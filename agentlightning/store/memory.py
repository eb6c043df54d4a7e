"""The memory store: everything on dictionaries, under one lock.

It is safe to use from any number of threads and event loops. When spans outgrow the eviction threshold, the spans of
the oldest rollouts are dropped, whole rollouts at a time, until the safe threshold holds again. Rollouts themselves are
never dropped; a warning tells when they alone outgrow the threshold.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from agentlightning.errors import ConfigurationError, StoreUnavailable
from agentlightning.store.base import LightningStoreStatistics
from agentlightning.store.lifecycle import LOST_WORKER_SECONDS
from agentlightning.store.local import DEFAULT_MAX_SPAN_BYTES as DEFAULT_MAX_SPAN_BYTES
from agentlightning.store.local import Call, Clock, LocalStore, execute
from agentlightning.store.memory_transaction import MemoryTransaction
from agentlightning.store.notices import NoticeBoard, NoticeFields
from agentlightning.types import Span
from agentlightning.utils.metrics import MetricsBackend

__all__ = ["InMemoryLightningStore", "estimate_model_size"]

DEFAULT_EVICTION_RATIO = 0.7
SAFE_SHARE_OF_EVICTION = 0.8

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

    return min([psutil.virtual_memory().total, *_container_limits(root)])


def _container_limits(root: Path) -> Iterator[int]:
    """Limits of the control groups that this process is in, of both versions; a group counts for those beneath it."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, of which only the top is to be seen.
        group = top / path.strip("/")
        for folder in {top, group, *(parent for parent in group.parents if top in parent.parents)}:
            try:
                text = (folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text.isdecimal():  # else it is "max"
                yield int(text)


def _threshold_bytes(name: str, value: float | int, total: int, *, least: int) -> int:
    """A float is a share of this machine's memory, an int a number of bytes."""
    if isinstance(value, float):
        if not (0.0 < value <= 1.0 or (least == 0 and value == 0.0)):
            raise ConfigurationError(f"{name} is {value}; as a share of memory it must lie between 0 and 1.")
        return int(total * value)
    if isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name} is {value}; as a number of bytes it must be at least {least}.")
    return value


class InMemoryLightningStore(LocalStore):
    """A store that lives and dies with its process."""

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
        clock: Clock | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            thread_safe: Accepted and ignored; this store is always thread-safe.
            eviction_memory_threshold: Spans above this are dropped; a share of memory (float) or bytes (int).
            safe_memory_threshold: Dropping stops at or below this; by default four fifths of the other threshold.
            span_size_estimator: Bytes of one span; by default an estimate that is right to about a fifth.
            tracker: Measures every operation.
            scan_debounce_seconds: Least time between two looks of the watchdog.
            lost_worker_seconds: How long a worker with heartbeats may be silent until what it claimed is given back.
            max_span_bytes: Largest span that is accepted, as JSON.
            clock: Seconds since the epoch; for tests.
        """
        super().__init__(
            max_span_bytes=max_span_bytes,
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
        self._tx = MemoryTransaction(max_span_bytes=max_span_bytes, span_size_estimator=span_size_estimator)
        self._is_closed = False
        self._has_warned = False

    async def close(self) -> None:
        """Refuse all further work; whoever waits is told. What the store holds goes with it."""
        with self._lock:
            self._is_closed = True
        self._board.wake_everyone()

    async def _run_write(self, call: Call) -> object:
        return self._run(call)

    async def _run_read(self, call: Call) -> object:
        return self._run(call)

    def number_at_once(self, rollout_ids: Sequence[str]) -> Sequence[int]:
        with self._lock:
            return [self._tx.take_sequence(rollout_id) for rollout_id in rollout_ids]

    def _run(self, call: Call) -> object:
        with self._lock:
            self._check_open()
            now = self._clock()
            if call.watchdog and (self._tx.due_heap or now >= self._watch.next_sweep):
                look = self._watch.look(self._tx.earliest_due(), now)
                if look is not None:
                    self._transact(look, now)
            return self._transact(call, now)

    def _transact(self, call: Call, now: float) -> object:
        tx, board = self._tx, self._board
        due = tx.earliest_due() if board.has_waiters else None
        try:
            result = execute(call, tx, now)
        except BaseException:
            tx.take_back()
            raise
        tx.keep()
        notices = tx.take_notices()
        if notices:
            board.publish(notices)
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
        """Drop spans of the oldest rollouts until the safe threshold holds."""
        tx = self._tx
        holding = [entry for entry in tx.entries.values() if entry.spans]
        for entry in sorted(holding, key=lambda entry: entry.rollout.start_time):
            if tx.span_bytes <= self._safe_threshold_bytes:
                return
            tx.evict_spans(entry)

    def _next_due(self) -> float | None:
        with self._lock:
            return self._tx.earliest_due()

    async def _notices_after(self, cursor: int) -> Sequence[NoticeFields] | None:
        notices = self._board.after(cursor)
        if not notices:
            self._check_open()
        return notices

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("This memory store is closed; make another InMemoryLightningStore.")

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
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._board = NoticeBoard()
        self._board.start_at(state["_board"])
