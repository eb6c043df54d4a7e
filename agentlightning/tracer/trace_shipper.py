"""TraceShipper: brings the finished spans of traces to one store, in a thread of its own.

A store of this process has a span after 30 ms at most, a remote one after a tenth of a second. `flush` waits until
everything put before is settled, or gives up the rest of its trace at the deadline; `withdraw` leaves the rest of a
short trace to the caller. A lost span is counted on its trace, with the reason, and logged.

Most spans end before anybody could look, and the store never sees those twice. A span that has been open for a second
is shown to the store before its end. If that fails, the finished span comes all the same.
"""

import asyncio
import contextvars
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from opentelemetry import trace

from agentlightning.instrumentation.model_calls import recording_of
from agentlightning.instrumentation.otel_internals import attributes_of, events_of, settled
from agentlightning.instrumentation.otel_internals import suppress as suppress_instrumentation
from agentlightning.semconv import RECORDED_AS
from agentlightning.store.base import LightningStore
from agentlightning.store.behaviour.spans import outline_of
from agentlightning.store.local import local_store
from agentlightning.tracer.binding import Binding, unobserved
from agentlightning.tracer.shipper import PendingItem, Shipper, ShipperLimits
from agentlightning.tracer.spans import SpanConverter
from agentlightning.types import Span, TraceStatus
from agentlightning.types.tracer import convert_timestamp
from agentlightning.utils.log_failures import log_failures
from agentlightning.utils.loop_thread import LoopThread
from agentlightning.utils.once import once

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace import Span as LiveSpan

logger = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 60.0
"""How long the end of a trace waits for its spans: as long as a store client waits for a server that went away."""
CLOSE_SECONDS: Final = 5.0
NUMBER_SECONDS: Final = 1.0
"""How long somebody who asks for the number of a span waits for a store of this process."""
MOST_SEARCHED: Final = 100
"""In a longer queue than this the end of a trace does not look for its spans."""
LOCAL_LINGER_SECONDS: Final = 0.03
"""`linger_seconds` before a store of this process, where a batch costs little."""
BUSY_SPANS: Final = 100
"""After a batch of so many spans, spans come so fast that larger batches save more than they delay."""
BARE_SPAN_BYTES: Final = 1000
"""About what a span takes that has no attributes."""
ITEM_BYTES: Final = 40
"""About what an attribute, or an item of a list, takes besides its text."""
SHOWN_SECONDS: Final = 1.0
"""How long a span is open before the store is shown it: most end before anybody could look."""
NANOSECONDS: Final = 1_000_000_000


class PendingSpan(PendingItem):
    """One finished span and the trace it belongs to."""

    __slots__ = ("binding", "converter", "sequence_id", "span")

    def __init__(self, binding: Binding, span: "ReadableSpan", converter: SpanConverter) -> None:
        recording = attributes_of(span).get(RECORDED_AS)
        if recording is not None:
            own = str(recording).startswith(recording_of(binding.rollout_id, binding.attempt_id, ""))
            span = settled(span, is_whole=not own)
        self.weight = _weigh(span)  # without super(): every span of an agent passes here
        self.is_settled = False
        self.binding = binding
        self.span = span
        self.converter = converter
        self.sequence_id = 0
        """0 until it is numbered."""

    @property
    def owner(self) -> Binding:
        return self.binding

    @property
    def ended(self) -> float:
        return self.span.end_time or 0

    def make_spans(self) -> list[Span]:
        binding = self.binding
        return [self.converter.convert(self.span, binding.rollout_id, binding.attempt_id, self.sequence_id)]

    def number(self, sequence_id: int) -> None:
        """Give it its final number; its trace remembers it."""
        self.sequence_id = sequence_id
        context = self.span.get_span_context()
        if context is not None:
            self.binding.recorder.numbers[context.span_id] = sequence_id

    def store(self, stored: Sequence[Span | None]) -> None:
        self.is_settled = True
        if not self.sequence_id and stored and stored[0] is not None:
            self.number(stored[0].sequence_id)

    def lose(self, reason: str, error: Exception | None = None) -> None:
        if self.is_settled:
            return
        self.is_settled = True
        losses = self.binding.recorder.losses
        losses.add(reason)
        if losses.count == 1:
            logger.warning(
                "Span '%s' of rollout '%s', attempt '%s', is lost (%s); further losses of it are counted only.",
                *(self.span.name, self.binding.rollout_id, self.binding.attempt_id, reason),
            )


def _weigh(span: "ReadableSpan") -> int:
    """Bytes, roughly: enough to keep long prompts from filling the memory."""
    values = tuple(attributes_of(span).values())
    weight = BARE_SPAN_BYTES * (1 + len(events_of(span))) + ITEM_BYTES * len(values)
    weight += sum([len(value) for value in values if type(value) is str])
    for value in values:
        if type(value) is tuple or type(value) is list:
            weight += ITEM_BYTES * len(value) + sum([len(item) for item in value if type(item) is str])
    return weight


def _outline(binding: Binding, span: "LiveSpan") -> Span:
    context = span.get_span_context()
    return Span.from_attributes(
        attributes=outline_of(dict(attributes_of(span))),
        rollout_id=binding.rollout_id,
        attempt_id=binding.attempt_id,
        name=span.name,
        trace_id=trace.format_trace_id(context.trace_id),
        span_id=trace.format_span_id(context.span_id),
        parent_id=None if span.parent is None else trace.format_span_id(span.parent.span_id),
        start_time=convert_timestamp(span.start_time),
        status=TraceStatus(status_code="UNSET"),
    )


class TraceShipper(Shipper):
    """The way to one store, shared by all traces of this process."""

    def __init__(self, store: LightningStore, limits: ShipperLimits | None = None) -> None:
        self._is_closed = False
        self.users = 0
        """How many have acquired it."""
        super().__init__(store, limits)

    def _reset(self) -> None:
        """Begin anew; also in a forked child, where the thread and what it had to deliver are the parent's."""
        super()._reset()
        self._local = local_store(self.store)  # a server's store is not ours in a forked child
        self._starting = threading.RLock()  # protects `_thread`; a span may end while this very thread holds it
        self._thread: LoopThread | None = None
        self._converter = SpanConverter()
        self._traces: set[Binding] = set()  # changed by the agents' threads

    # ------------------------------------------------------------------ the agent's side

    def open(self, binding: Binding) -> None:
        """Show those spans of a trace that stay open, until it is flushed or withdrawn."""
        self._traces.add(binding)
        if self._thread is None and not self._is_closed:
            self.start()

    def put(self, binding: Binding, span: "ReadableSpan") -> None:
        """Accept a finished span; returns at once unless the queue is full, and never raises."""
        pending = PendingSpan(binding, span, self._converter)
        if self._is_closed or binding.recorder.is_given_up:
            pending.lose("it ended after its trace was closed")
        elif not self.has_room and not self.wait_for_room():
            pending.lose("the queue was full")
        else:
            self.append(pending)
            if self._thread is None:
                self.start()

    async def flush(self, binding: Binding, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait until what was put before is settled; False if that took too long and spans of the trace were lost."""
        self._traces.discard(binding)
        marker = self.mark()
        if marker is not None:
            # Not wait_for, which would cancel the marker, and before Python 3.12 could lose a cancellation of ours.
            await asyncio.wait([asyncio.wrap_future(marker)], timeout=timeout)
        return marker is None or marker.done() or self._give_up(binding, timeout)

    def flush_blocking(self, binding: Binding, timeout: float = FLUSH_SECONDS) -> bool:
        """As `flush`, for code without an event loop."""
        self._traces.discard(binding)
        return self._is_settled_within(timeout) or self._give_up(binding, timeout)

    def _is_settled_within(self, seconds: float) -> bool:
        """Block until what was put before is settled, for so long at most."""
        marker = self.mark()
        if marker is not None:
            with suppress(FutureTimeout):
                marker.result(seconds)
        return marker is None or marker.done()

    def mark(self) -> "Future[None] | None":
        return None if self._thread is None else super().mark()

    def _give_up(self, binding: Binding, timeout: float) -> bool:
        binding.recorder.is_given_up = True
        lost = [item for item in self.outstanding() if item.owner is binding]
        for item in lost:
            item.lose(f"the store did not take it within {timeout:g} s of the end of its trace")
        return not lost

    def withdraw(self, binding: Binding) -> list[Span] | None:
        """What is left of a trace, for a caller who stores it, in the order the spans ended.

        Spans have a number if the store has given it out, else 0 for the store to number them. None if there is too
        much of it, or some of it is on its way already: then it must be flushed.
        """
        self._traces.discard(binding)
        with self._taking:
            if len(self._queue) > MOST_SEARCHED or any(item.owner is binding for item in self._in_flight):
                return None
            queued = self._queue.copy()
            waiting = [item for item in queued if isinstance(item, PendingSpan) and item.binding is binding]
            for pending in waiting:
                self._queue.remove(pending)
                self._queued_bytes -= pending.weight
        spans: list[Span] = []
        for pending in sorted(waiting, key=lambda pending: pending.ended):
            try:
                spans += pending.make_spans()
            except (ValueError, TypeError) as error:
                pending.lose(f"it cannot be written as JSON: {type(error).__name__}: {error}")
            pending.is_settled = True
        return spans

    def number_waiting(self) -> None:
        """Give what waits its numbers, if the store is in this process: memory numbers at once, a file as it stores."""
        if self._local is None:
            return
        with self._taking:
            fresh = [item for item in self._queue.copy() if isinstance(item, PendingSpan) and not item.sequence_id]
            fresh.sort(key=lambda pending: pending.ended)
            ids = [pending.binding.rollout_id for pending in fresh]
            numbers = None if self._in_flight else self._local.number_at_once(ids)
            for pending, sequence_id in zip(fresh, numbers or (), strict=False):
                pending.number(sequence_id)
        if numbers is None and threading.get_ident() != self._loop_thread_id:
            self._is_settled_within(NUMBER_SECONDS)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Deliver what is left, for so long at most, and end the thread."""
        self._is_closed = True
        self._is_settled_within(timeout)
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
        for item in self.outstanding():
            item.lose("the tracer was closed before the store took it")

    # ------------------------------------------------------------------ the thread's side

    def start(self) -> None:
        """Be ready for the first span, which otherwise waits until the thread has started; harmless the second time."""
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread("agl-span-shipper")
                # In an empty context: the loop must not inherit the trace of the agent that happened to come first.
                contextvars.Context().run(self._thread.start_soon, self.run()).add_done_callback(_log_end)

    async def run(self) -> None:
        showing = asyncio.create_task(self._show_again_and_again(), name="open-spans")
        try:
            await super().run()
        finally:
            showing.cancel()

    async def _show_again_and_again(self) -> None:
        suppress_instrumentation()
        with unobserved():
            while True:
                await asyncio.sleep(SHOWN_SECONDS)
                await self.show_open_spans(time.time_ns())

    async def show_open_spans(self, now_ns: int) -> None:
        """Show spans that have been open for a while; each is shown once."""
        open_spans: list[Span] = []
        for binding in [each for each in list(self._traces) if not each.recorder.is_given_up]:
            for span_id, span in list(binding.recorder.open_spans.items()):
                if now_ns - (span.start_time or now_ns) < SHOWN_SECONDS * NANOSECONDS:
                    continue
                is_open = binding.recorder.open_spans.pop(span_id, None) is not None and span.end_time is None
                if is_open and span.get_span_context().trace_flags.sampled:
                    open_spans.append(_outline(binding, span))
        if open_spans:
            with log_failures(logger, "%d open spans were not shown", len(open_spans), level=logging.DEBUG):
                await self.store.add_open_spans(open_spans)

    def _linger_seconds(self) -> float:
        seconds = self.limits.linger_seconds
        is_busy = self._last_batch_items >= BUSY_SPANS
        return seconds if self._local is None or is_busy else min(seconds, LOCAL_LINGER_SECONDS)


def _log_end(running: "Future[None]") -> None:
    """The loop ends when it is cancelled; anything else is a fault of ours, and traces will report their losses."""
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("The shipping of spans has broken down.", exc_info=error)


class TraceShippers:
    """The shippers of this process; tracers that write to the same store share one."""

    def __init__(self) -> None:
        self._sharing = threading.Lock()  # protects the mapping and the counts of users
        self._by_store: dict[int, TraceShipper] = {}

    def acquire(self, store: LightningStore) -> TraceShipper:
        """The shipper to a store; give it back with `release`."""
        with self._sharing:
            key = id(store)  # stays the store's own: the shipper keeps it alive
            shipper = self._by_store.get(key) or self._by_store.setdefault(key, TraceShipper(store))
            shipper.users += 1
            return shipper

    def release(self, shipper: TraceShipper) -> None:
        """The last one to let go closes it."""
        with self._sharing:
            shipper.users -= 1
            if shipper.users:
                return
            del self._by_store[id(shipper.store)]
        shipper.close()

    def reset_in_child(self) -> None:
        """A forked child begins with empty queues and no threads."""
        self._sharing = threading.Lock()
        for shipper in self._by_store.values():
            shipper._reset()


@once
def trace_shippers() -> TraceShippers:
    """One per process, so that rollouts side by side fill the same batches."""
    shippers = TraceShippers()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=shippers.reset_in_child)
    return shippers
