"""Taking finished spans to the store, in batches, off the agent's thread.

`put` leaves a span in a queue and returns; a loop in a thread of its own numbers and stores what has gathered within a
moment: a store of this process has a span after 30 ms at most, a remote one after a tenth of a second. The end of a
short trace takes what is left of it to the store itself, which is quicker than to wake the loop and wait for it. While
the store cannot be reached the batch waits and is tried again; what the store refuses is sought out, so that one bad
span does not take others with it. `flush` waits until all that was put before has been settled, or gives up the rest of
its trace at the deadline. A span that could not be brought to the store is counted on its trace, with the reason, and
logged: none is dropped in silence.

The queue is bounded. An agent that finds it full waits for a moment, once; while the store makes no progress, further
spans are lost at once instead of making the agent wait again.
"""

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context

from agentlightning.errors import NotAllowed, NotFound, StoreError, StoreUnavailable
from agentlightning.store.base import LightningStore
from agentlightning.store.foreign import adapted
from agentlightning.store.local import local_store
from agentlightning.tracer.binding import Binding, unobserved
from agentlightning.tracer.conversion import SpanConverter
from agentlightning.tracer.open_spans import OpenSpans
from agentlightning.tracer.parcels import Parcel, in_order, store_parcels
from agentlightning.types import Span
from agentlightning.utils.deadline import within
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.once import fork_handlers, once

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace import Span as LiveSpan

__all__ = ["Deliveries", "Delivery", "DeliveryLimits", "deliveries"]

logger = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 60.0
"""How long the end of a trace waits for its spans: as long as a store client waits for a server that went away."""
CLOSE_SECONDS: Final = 5.0
NUMBER_SECONDS: Final = 1.0
"""How long somebody who asks for the number of a span waits for a store of this process."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
UNNUMBERED: Final = 0
MOST_SEARCHED: Final = 100
"""In a longer queue than this the end of a trace does not look for its spans."""
IDLE_ROUNDS: Final = 10
"""Looks at an empty queue before the loop sleeps until it is woken."""
LOCAL_LINGER_SECONDS: Final = 0.03
"""`linger_seconds` before a store of this process, where a batch costs little."""
BUSY_SPANS: Final = 100
"""After a batch of so many spans, spans come so fast that larger batches save more than they delay."""


@dataclass(frozen=True)
class DeliveryLimits:
    """How much may wait, and for how long."""

    queued_spans: int = 20_000
    queued_bytes: int = 64 * 1024**2
    patience_seconds: float = 0.25
    """How long an agent waits for room in a full queue."""
    batch_spans: int = 500
    batch_bytes: int = 4 * 1024**2
    linger_seconds: float = 0.1
    """How long the first span of a batch waits for others at most; a flush does not wait."""


class Delivery:
    """The way to one store, shared by all traces of this process."""

    def __init__(self, store: LightningStore, limits: DeliveryLimits | None = None) -> None:
        self.store = store
        self._adapted = adapted(store)
        self._limits = limits or DeliveryLimits()
        self._is_closed = False
        self._start_afresh()
        fork_handlers().add(self, Delivery._start_afresh)

    def _start_afresh(self) -> None:
        """As new; also in a forked child, where the thread and what it had to deliver are the parent's."""
        self._local = local_store(self.store)  # a server's store is not ours in a forked child
        self._starting = threading.RLock()  # protects `_thread`; a span may end while this very thread holds it
        self._thread: LoopThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread_id: int | None = None
        self._taking = threading.Lock()  # protects the queue's head and `_in_flight` from two who take at once
        self._carried: list[Parcel] = []  # by those who end their trace
        self._converters = threading.local()
        self._open_spans = OpenSpans()
        self._begun = self._open_spans.begun  # looked up for every span
        self._queue: deque[Parcel | Future[None]] = deque()
        self._queued_bytes = 0  # an estimate; put right whenever the queue is empty
        self._room = threading.Condition()  # notified when a batch has left the queue
        self._in_flight: Sequence[Parcel] = ()
        self._is_awake = True  # until the loop first finds nothing to do
        self._is_hurried = False  # somebody waits, or the queue is half full
        self._is_stalled = False
        self._is_busy = False  # the last batch was a large one
        self._has_told_of_outage = False

    # ------------------------------------------------------------------ the agent's side

    def begin(self, binding: Binding, span: "LiveSpan") -> None:
        """Note that a span has begun; the store is told if it is open for a while."""
        self._begun.append((binding, span))
        if not self._is_awake:
            self._wake()
        elif self._thread is None and not self._is_closed:
            self.start()

    def put(self, binding: Binding, span: "ReadableSpan") -> None:
        """Accept a finished span; returns at once unless the queue is full, and never raises."""
        parcel = Parcel(binding, span)
        if self._is_closed or binding.recorder.is_given_up:
            parcel.lose("it ended after its trace was closed")
            return
        if not self._has_room() and not self._wait_for_room():
            parcel.lose("the queue was full")
            return
        self._queued_bytes += parcel.weight
        self._queue.append(parcel)
        if self._thread is None:
            self.start()
        if len(self._queue) == self._limits.queued_spans // 2:
            self._hurry()
        elif not self._is_awake:
            self._wake()

    def _has_room(self) -> bool:
        return len(self._queue) < self._limits.queued_spans and self._queued_bytes < self._limits.queued_bytes

    def _wait_for_room(self) -> bool:
        if self._is_stalled or threading.get_ident() == self._loop_thread_id:
            return False
        with self._room:
            has_room = self._room.wait_for(self._has_room, self._limits.patience_seconds)
        self._is_stalled = not has_room
        return has_room

    async def flush(self, binding: Binding, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait until what was put before is settled; False if that took too long and spans of the trace were lost."""
        deadline = asyncio.get_running_loop().time() + timeout
        if await self._carry(binding, timeout):
            return True
        marker = self._mark()
        if marker is not None:
            # Not wait_for, which would cancel the marker, and before Python 3.12 could lose a cancellation of ours.
            remaining = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait([asyncio.wrap_future(marker)], timeout=remaining)
        return self._give_up(binding, timeout) if marker is not None and not marker.done() else True

    async def _carry(self, binding: Binding, timeout: float) -> bool:
        """Take what is left of a trace to the store, in the caller's own loop; False if that is the loop's business."""
        parcels = self._take_own(binding)
        if parcels is None:
            return False
        if not parcels:
            return True
        attached = otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
        try:
            with unobserved():
                await within(timeout, store_parcels(self._adapted, parcels, self._converter()))
        except Exception as error:  # noqa: BLE001 # the loop knows what to do about it
            logger.debug("The end of a trace is left to the delivery loop: %s: %s", type(error).__name__, error)
            return False
        finally:
            otel_context.detach(attached)
            self._put_back(parcels)
        return True

    def withdraw(self, binding: Binding) -> list[Span] | None:
        """What is left of a trace, for a caller who stores it himself, in the order the spans ended.

        Spans have a number if the store has given it out, else 0 for the store to number them. None if there is too
        much of it, or some of it is on its way already: then it must be flushed.
        """
        parcels = self._take_own(binding)
        if parcels is None:
            return None
        self._number(parcels)
        converter, spans = self._converter(), []
        for parcel in in_order(parcels):
            number = parcel.sequence_id or UNNUMBERED
            try:
                spans.append(converter.convert(parcel.span, binding.rollout_id, binding.attempt_id, number))
            except (ValueError, TypeError) as error:
                parcel.lose(f"it cannot be written as JSON: {type(error).__name__}: {error}")
            parcel.is_settled = True
        self._put_back(parcels)
        return spans

    def _take_own(self, binding: Binding) -> list[Parcel] | None:
        """What waits of a trace, out of the queue; None if there is too much, or some of it is on its way."""
        with self._taking:
            if len(self._queue) > MOST_SEARCHED or any(parcel.binding is binding for parcel in self._in_flight):
                return None
            waiting = [item for item in self._queue.copy() if isinstance(item, Parcel) and item.binding is binding]
            for parcel in waiting:
                self._queue.remove(parcel)
                self._queued_bytes -= parcel.weight
            self._carried += waiting
        return waiting

    def _put_back(self, parcels: Sequence[Parcel]) -> None:
        """Those that did not arrive wait again, before all others."""
        with self._taking:
            self._carried = [parcel for parcel in self._carried if parcel not in parcels]
            left = [parcel for parcel in parcels if not parcel.is_settled]
            self._queue.extendleft(reversed(left))
            self._queued_bytes += sum(parcel.weight for parcel in left)

    def number_waiting(self) -> None:
        """Give what waits its numbers, if the store is in this process: memory numbers at once, a file as it stores."""
        if self._local is None:
            return
        with self._taking:
            waiting = [item for item in self._queue.copy() if isinstance(item, Parcel)]
            self._number(waiting)
            is_numbered = all(parcel.sequence_id is not None for parcel in (*self._in_flight, *waiting))
        marker = None if is_numbered or threading.get_ident() == self._loop_thread_id else self._mark()
        if marker is not None:
            with suppress(FutureTimeout):
                marker.result(NUMBER_SECONDS)

    def _number(self, parcels: Sequence[Parcel]) -> None:
        """Number those that have none; a store that takes its time numbers them when they are stored."""
        fresh = in_order(parcel for parcel in parcels if parcel.sequence_id is None)
        if self._local is not None and fresh:
            numbers = self._local.number_at_once([parcel.binding.rollout_id for parcel in fresh])
            for parcel, sequence_id in zip(fresh, numbers or (), strict=False):
                parcel.number(sequence_id)

    def _converter(self) -> SpanConverter:
        """One for each thread that stores spans."""
        converter: SpanConverter | None = getattr(self._converters, "kept", None)
        if converter is None:
            converter = self._converters.kept = SpanConverter()
        return converter

    def flush_blocking(self, binding: Binding, timeout: float = FLUSH_SECONDS) -> bool:
        """As `flush`, for code without an event loop."""
        marker = self._mark()
        if marker is not None:
            with suppress(FutureTimeout):
                marker.result(timeout)
        return self._give_up(binding, timeout) if marker is not None and not marker.done() else True

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Deliver what is left, for so long at most, and end the thread."""
        self._is_closed = True
        marker = self._mark()
        if marker is not None:
            with suppress(FutureTimeout):
                marker.result(timeout)
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
        for parcel in self._outstanding():
            parcel.lose("the tracer was closed before the store took it")

    def _mark(self) -> "Future[None] | None":
        """A future that is done when all that was put before is settled; None if nothing is under way."""
        if self._thread is None or (not self._queue and not self._in_flight):
            return None
        marker: Future[None] = Future()
        self._queue.append(marker)
        self._hurry()
        return marker

    def _give_up(self, binding: Binding, timeout: float) -> bool:
        binding.recorder.is_given_up = True
        lost = [parcel for parcel in self._outstanding() if parcel.binding is binding]
        for parcel in lost:
            parcel.lose(f"the store did not take it within {timeout:g} s of the end of its trace")
        return not lost

    def _outstanding(self) -> list[Parcel]:
        while True:
            with suppress(RuntimeError):  # the queue changed while it was copied
                waiting = [item for item in self._queue.copy() if isinstance(item, Parcel)]
                return [parcel for parcel in (*self._in_flight, *self._carried, *waiting) if not parcel.is_settled]

    # ------------------------------------------------------------------ the loop's side

    def start(self) -> None:
        """Be ready for the first span, which otherwise waits until the thread has started; harmless the second time."""
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread("agl-span-delivery")
                # In an empty context: the loop must not inherit the trace of the agent that happened to come first.
                draining = contextvars.Context().run(self._thread.start_soon, self._drain())
                draining.add_done_callback(_tell_of_end)

    def _hurry(self) -> None:
        self._is_hurried = True
        self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None:
            self._is_awake = True
            with suppress(RuntimeError):  # the loop was closed meanwhile, by `close`
                loop.call_soon_threadsafe(self._arrived.set)

    async def _drain(self) -> None:
        """Deliver for ever. What the store does to serve us is not observed."""
        otel_context.attach(otel_context.set_value(otel_context._SUPPRESS_INSTRUMENTATION_KEY, value=True))
        self._arrived = asyncio.Event()
        self._loop_thread_id = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        with unobserved():
            while True:
                await self._gather()
                parcels, markers = self._take()
                self._is_busy = len(parcels) >= BUSY_SPANS
                await self._deliver(parcels)
                self._in_flight = ()
                for marker in markers:
                    marker.set_result(None)
                if self._open_spans.has_some:
                    await self._open_spans.look(self._adapted, self._loop.time(), self._linger_seconds())

    async def _gather(self) -> None:
        """Wait for spans, a little longer than for the first of them, unless somebody cannot wait.

        Falls asleep only after a quiet while: to wake us costs the agent more than to leave a span for the next look.
        """
        for _ in range(IDLE_ROUNDS):
            if self._is_hurried or len(self._queue) >= self._limits.batch_spans:
                break
            await self._nap(self._linger_seconds())
            if self._queue or self._open_spans.has_some:
                break
        if not self._queue and not self._open_spans.has_some:
            self._queued_bytes = 0
            self._is_awake = False
            if not self._queue and not self._open_spans.has_some:
                await self._arrived.wait()
            self._is_awake = True
            self._arrived.clear()
        self._is_hurried = False

    def _linger_seconds(self) -> float:
        seconds = self._limits.linger_seconds
        return seconds if self._local is None or self._is_busy else min(seconds, LOCAL_LINGER_SECONDS)

    async def _nap(self, seconds: float) -> None:
        """Sleep so long, or until woken."""
        alarm = asyncio.get_running_loop().call_later(seconds, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            alarm.cancel()
        self._arrived.clear()

    def _take(self) -> "tuple[list[Parcel], list[Future[None]]]":
        """The next batch, and who waits for it."""
        parcels: list[Parcel] = []
        markers: list[Future[None]] = []
        weight = 0
        with self._taking:
            while self._queue and len(parcels) < self._limits.batch_spans and weight < self._limits.batch_bytes:
                item = self._queue[0]
                if isinstance(item, Parcel):
                    if markers:
                        break
                    weight += item.weight
                    parcels.append(item)
                    self._in_flight = parcels
                else:
                    markers.append(item)
                self._queue.popleft()
            self._queued_bytes -= weight
            self._number(parcels)
        return parcels, markers

    async def _deliver(self, parcels: Sequence[Parcel]) -> None:
        """Bring a batch to the store, however long that takes; parcels that were given up meanwhile are left out."""
        pause = FIRST_PAUSE_SECONDS
        while parcels := [parcel for parcel in parcels if not parcel.is_settled]:
            try:
                await store_parcels(self._adapted, parcels, self._converter())
            except Exception as error:  # noqa: BLE001 # whatever a store raises must not end the delivery
                if _is_refusal(error):
                    await self._sort_out(parcels, error)
                    return
                self._tell_of_outage(error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            else:
                self._has_told_of_outage = False
        self._make_room()

    async def _sort_out(self, parcels: Sequence[Parcel], error: Exception) -> None:
        """The store refused a batch, all or nothing: find the parcels it means."""
        are_of_one_trace = len({id(parcel.binding) for parcel in parcels}) == 1
        if len(parcels) == 1 or (are_of_one_trace and isinstance(error, (NotFound, NotAllowed))):
            for parcel in parcels:
                parcel.lose(f"the store refused it: {type(error).__name__}: {error}")
            self._make_room()
            return
        half = len(parcels) // 2
        await self._deliver(parcels[:half])
        await self._deliver(parcels[half:])

    def _make_room(self) -> None:
        self._is_stalled = False
        with self._room:
            self._room.notify_all()

    def _tell_of_outage(self, error: Exception) -> None:
        if not self._has_told_of_outage:
            self._has_told_of_outage = True
            logger.warning(
                "Spans wait because the store cannot take them: %s: %s; trying again.", type(error).__name__, error
            )


def _tell_of_end(draining: "Future[None]") -> None:
    """The loop ends when it is cancelled; anything else is a fault of ours, and traces will report their losses."""
    if not draining.cancelled() and (error := draining.exception()) is not None:
        logger.error("The delivery of spans has broken down.", exc_info=error)


def _is_refusal(error: Exception) -> bool:
    """Whether trying the same again would end the same."""
    return isinstance(error, (StoreError, ValueError, TypeError)) and not isinstance(error, StoreUnavailable)


# ---------------------------------------------------------------------- one for each store


class Deliveries:
    """The deliveries of this process; tracers that write to the same store share one."""

    def __init__(self) -> None:
        self._sharing = threading.Lock()  # protects the two mappings
        self._by_store: dict[int, Delivery] = {}
        self._users: dict[int, int] = {}

    def acquire(self, store: LightningStore) -> Delivery:
        """The delivery to a store; give it back with `release`."""
        with self._sharing:
            key = id(store)  # stays the store's own: the delivery keeps it alive
            if key not in self._by_store:
                self._by_store[key] = Delivery(store)
            self._users[key] = self._users.get(key, 0) + 1
            return self._by_store[key]

    def release(self, delivery: Delivery) -> None:
        """The last one to let go closes it."""
        key = id(delivery.store)
        with self._sharing:
            self._users[key] -= 1
            is_last = self._users[key] == 0
            if is_last:
                del self._by_store[key], self._users[key]
        if is_last:
            delivery.close()


@once
def deliveries() -> Deliveries:
    """One per process, so that rollouts side by side fill the same batches."""
    return Deliveries()
