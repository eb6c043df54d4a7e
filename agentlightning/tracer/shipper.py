"""Shipper: brings spans to the store in batches, off the path of those who make them.

Producers append items, each one or more spans that belong together; a loop stores what has gathered. While the store
cannot be reached a batch waits and is tried again. If the store refuses a batch, halves of it are tried until the item
at fault is found, so that one bad span does not take others with it. An item is settled exactly once: it is stored, or
it is lost and told the reason. The store numbers the spans, in the order in which they ended.

The queue is bounded. A producer that finds it full waits for a moment, once; while the store makes no progress, further
items find no room at once.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from agentlightning.errors import NotAllowed, NotFound, QuotaExceeded, StoreError, StoreUnavailable
from agentlightning.instrumentation.otel_internals import suppress as suppress_instrumentation
from agentlightning.store.base import LightningStore
from agentlightning.tracer.binding import unobserved
from agentlightning.types import Span
from agentlightning.utils.retries import RetryPolicy, retry

logger = logging.getLogger(__name__)

MOST_TRIES: Final = 3
"""Of a batch whose store raises what is neither a refusal nor an outage."""
THREAD_FROM_BYTES: Final = 1024**2
"""The spans of larger items are made in a thread."""


def _is_refusal(error: Exception) -> bool:
    """Whether the store was asked, and will never take a batch."""
    return isinstance(error, (StoreError, ValueError, TypeError)) and not isinstance(error, StoreUnavailable)


_POLICY: Final = RetryPolicy(
    is_passing=lambda error: not _is_refusal(error),
    delays=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0),
    # Stores of others raise what their networks raise when they cannot be reached.
    is_outage=lambda error: isinstance(error, (StoreUnavailable, OSError, asyncio.TimeoutError)),
)


@dataclass(frozen=True)
class ShipperLimits:
    """How much may wait, and for how long."""

    queued_items: int = 20_000
    queued_bytes: int = 64 * 1024**2
    patience_seconds: float = 0.25
    """How long a producer waits for the store at most."""
    batch_items: int = 500
    batch_bytes: int = 4 * 1024**2
    """A batch ends with the item that reaches this."""
    linger_seconds: float = 0.1
    """How long the first item of a batch waits for others at most; a flush does not wait."""


class PendingItem(ABC):
    """Spans that belong together and wait to be stored."""

    __slots__ = ("is_settled", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        """Bytes, roughly."""
        self.is_settled = False

    @property
    @abstractmethod
    def owner(self) -> Hashable:
        """The trace or attempt: if the store does not know it, all its items are lost at once."""

    @property
    @abstractmethod
    def ended(self) -> float:
        """When it ended, to compare with items of the same shipper."""

    @abstractmethod
    def make_spans(self) -> Sequence[Span]:
        """The spans to store, with sequence id 0 for the store to number; ValueError if they cannot be written."""

    @abstractmethod
    def store(self, stored: Sequence[Span | None]) -> None:
        """The store has its spans, with their numbers; None for those that it had already."""

    @abstractmethod
    def lose(self, reason: str, error: Exception | None = None) -> None:
        """Its spans will not be stored; harmless once it is settled.

        Args:
            error: What the store raised, if it was asked.
        """


class Shipper:
    """The way to one store. `append` from any thread; `run` in one loop."""

    def __init__(self, store: LightningStore, limits: ShipperLimits | None = None) -> None:
        self.store = store
        self.limits = limits or ShipperLimits()
        self._reset()

    def _reset(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread_id: int | None = None
        self._arrived: asyncio.Event | None = None
        self._taking = threading.Lock()  # protects the queue's head and `_in_flight` from two who take at once
        self._queue: deque[PendingItem | Future[None]] = deque()
        self._queued_bytes = 0  # an estimate; corrected whenever the queue is empty
        self._in_flight: Sequence[PendingItem] = ()
        self._last_batch_items = 0
        self._progress = threading.Condition()  # notified when a batch has left the queue
        self._is_awake = True  # until the loop first finds nothing to do
        self._is_hurried = False  # somebody waits, or the queue is half full
        self.is_stalled = False
        """Whether somebody has waited for the store in vain since it last took something."""
        self._has_warned_of_outage = False

    # ------------------------------------------------------------------ producers

    @property
    def has_room(self) -> bool:
        return len(self._queue) < self.limits.queued_items and self._queued_bytes < self.limits.queued_bytes

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    def wait_for_room(self) -> bool:
        """Block for a moment if the queue is full; False if it still is, or there was no progress since the last."""
        if self.is_stalled or threading.get_ident() == self._loop_thread_id:
            return False
        with self._progress:
            has_room = self._progress.wait_for(lambda: self.has_room, self.limits.patience_seconds)
        self.is_stalled = not has_room
        return has_room

    def append(self, item: PendingItem) -> None:
        """Queue an item; whether there is room is the caller's business."""
        self._queued_bytes += item.weight
        self._queue.append(item)
        if len(self._queue) == self.limits.queued_items // 2:
            self._hurry()
        elif not self._is_awake:
            self._wake()

    def mark(self) -> "Future[None] | None":
        """A future that is done when all items appended before are settled; None if there are none."""
        if not self._queue and not self._in_flight:
            return None
        marker: Future[None] = Future()
        self._queue.append(marker)
        self._hurry()
        return marker

    def outstanding(self) -> list[PendingItem]:
        """Items that are not settled."""
        while True:
            with suppress(RuntimeError):  # the queue changed while it was copied
                waiting = [item for item in self._queue.copy() if not isinstance(item, Future)]
                return [item for item in (*self._in_flight, *waiting) if not item.is_settled]

    def _hurry(self) -> None:
        self._is_hurried = True
        self._wake()

    def _wake(self) -> None:
        loop, arrived = self._loop, self._arrived
        if loop is None or arrived is None:
            return
        self._is_awake = True
        if threading.get_ident() == self._loop_thread_id:
            arrived.set()
        else:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(arrived.set)

    # ------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Ship until cancelled."""
        self._arrived = asyncio.Event()
        self._loop_thread_id = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        suppress_instrumentation()  # what the store does to serve us is not observed
        with unobserved():
            while True:
                await self._gather()
                items, markers = self._take()
                await self.ship(items)
                self._in_flight = ()
                for marker in markers:
                    marker.set_result(None)
                self._last_batch_items = len(items)

    async def _gather(self) -> None:
        """Wait for items, a little longer than for the first of them, unless somebody cannot wait.

        The loop falls asleep only after a quiet while: waking it costs a producer more than leaving an item for the
        next look.
        """
        # Look at an empty queue ten times before the loop sleeps until it is woken; once where nothing is waited for.
        for _ in range(10 if self.limits.linger_seconds else 1):
            if self._is_hurried or len(self._queue) >= self.limits.batch_items:
                break
            await self._sleep(self._linger_seconds())
            if self._queue:
                break
        if not self._queue:
            assert self._arrived is not None
            self._queued_bytes = 0
            self._is_awake = False
            if not self._queue:
                await self._arrived.wait()
            self._is_awake = True
            self._arrived.clear()
        self._is_hurried = False

    def _linger_seconds(self) -> float:
        return self.limits.linger_seconds

    async def _sleep(self, seconds: float) -> None:
        """Sleep so long, or until woken."""
        assert self._arrived is not None
        alarm = asyncio.get_running_loop().call_later(seconds, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            alarm.cancel()
        self._arrived.clear()

    def _take(self) -> "tuple[list[PendingItem], list[Future[None]]]":
        """The next batch, and the markers behind it."""
        items: list[PendingItem] = []
        markers: list[Future[None]] = []
        weight = 0
        with self._taking:
            while self._queue and len(items) < self.limits.batch_items and weight < self.limits.batch_bytes:
                first = self._queue[0]
                if isinstance(first, Future):
                    markers.append(first)
                elif markers:
                    break
                else:
                    weight += first.weight
                    items.append(first)
                    self._in_flight = items
                self._queue.popleft()
            self._queued_bytes -= weight
        return items, markers

    # ------------------------------------------------------------------ storing

    async def ship(self, items: Sequence[PendingItem], tries: int = MOST_TRIES) -> None:
        """Store or lose each item, however long the store is away; items that are settled meanwhile are left out.

        `tries` bounds failures that are neither a refusal nor an outage."""

        async def store() -> None:
            try:
                await self._store([item for item in items if not item.is_settled])
            except Exception as error:
                if not _is_refusal(error) and not self._has_warned_of_outage:
                    self._has_warned_of_outage = True
                    text = "Spans wait because the store cannot take them: %s: %s; trying again."
                    logger.warning(text, type(error).__name__, error)
                raise

        try:
            await retry(store, replace(_POLICY, tries=tries))
        except Exception as error:  # noqa: BLE001 # whatever a store raises must not end the loop
            await self._sort_out([item for item in items if not item.is_settled], error)
        else:
            self._has_warned_of_outage = False
            self._note_progress()

    async def _store(self, items: Sequence[PendingItem]) -> None:
        """Store a batch; may be repeated after a failure, because the store keeps one span of each id."""
        batch: list[tuple[PendingItem, Sequence[Span]]] = []
        weight = 0
        for item in sorted(items, key=lambda item: item.ended):
            try:
                is_large = item.weight > THREAD_FROM_BYTES
                batch.append((item, await asyncio.to_thread(item.make_spans) if is_large else item.make_spans()))
            except (ValueError, TypeError) as error:
                item.lose(f"it cannot be written as JSON: {type(error).__name__}: {error}", error)
            weight += item.weight
            # After so many bytes other tasks of the loop get their turn.
            if weight > 64 * 1024:
                weight = 0
                await asyncio.sleep(0)
        stored = await self.store.add_many_spans([span for _, spans in batch for span in spans])
        place = 0
        for item, spans in batch:
            item.store(stored[place : place + len(spans)])
            place += len(spans)

    async def _sort_out(self, items: Sequence[PendingItem], error: Exception) -> None:
        """The store refused a batch, all or nothing: find the items at fault."""
        is_of_one_owner = len({item.owner for item in items}) == 1
        if len(items) == 1 or (is_of_one_owner and isinstance(error, (NotFound, NotAllowed, QuotaExceeded))):
            for item in items:
                item.lose(f"the store refused it: {type(error).__name__}: {error}", error)
            self._note_progress()
            return
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            await self.ship(part, tries=1)

    def _note_progress(self) -> None:
        self.is_stalled = False
        with self._progress:
            self._progress.notify_all()
