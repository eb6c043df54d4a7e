"""Streams of events out of a store, as they happen.

    async with stream_events(store, learn, mode="hybrid", consumers=4, transform=of_kind("reward")) as results:
        async for result in results:
            ...

A follower reads every span once, in the order of its arrival in the store. A store keeps that order within a rollout,
so the number of spans read is where to go on, whatever happens to the subscription. Notices only say where to look;
after a gap, every rollout is looked at again. Batches are cut by the mode of the stream, and up to `consumers` of them
are handled at a time; results come in the order of their batches.

A step that takes a while is reported when it begins: its `StartEvent` comes then, everything else when it ends. Open
spans are queried before the finished ones are read, so a span that is in neither was left unfinished by an attempt that
is over; it ends with an `ErrorEvent`.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeAlias, TypeVar, overload

from typing_extensions import Self

from agentlightning.errors import ConfigurationError, SpansEvicted
from agentlightning.events.event import AgentEvent, ErrorEvent, RewardEvent, StartEvent
from agentlightning.events.spans import AgentNames, events_of
from agentlightning.events.views import Step, pipeline
from agentlightning.store import LightningStore
from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES, is_finished
from agentlightning.types import Notice, Rollout, Span

StreamMode = Literal["realtime", "batch", "hybrid"]
STREAM_MODES: tuple[StreamMode, ...] = ("realtime", "batch", "hybrid")
Batch: TypeAlias = tuple[AgentEvent, ...]
ResultT = TypeVar("ResultT")
Handler = Callable[[Batch], Awaitable[ResultT]]

PAGE_SIZE = 500
"""How many spans, or rollouts, are read at a time."""


@dataclass(frozen=True)
class StreamOptions:
    """Which part of a store a stream follows, and how large its batches are."""

    rollout_ids: Collection[str] | None = None
    """Only these rollouts; the stream ends when all of them are finished. None follows every rollout, for ever."""
    batch_size: int = 100
    """Most events in a batch; only a single span with more events exceeds it."""
    batch_seconds: float = 0.5
    """Longest time an event waits for its batch to fill."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_seconds < 0:
            raise ConfigurationError(
                f"batch_size is {self.batch_size} and batch_seconds {self.batch_seconds}; "
                "use at least one event and at least 0 seconds."
            )


@overload
def stream_events(
    store: LightningStore,
    *,
    mode: StreamMode = "realtime",
    consumers: int = 1,
    transform: Step | None = None,
    options: StreamOptions | None = None,
) -> "EventStream[Batch]": ...


@overload
def stream_events(
    store: LightningStore,
    handle: Handler[ResultT],
    *,
    mode: StreamMode = "realtime",
    consumers: int = 1,
    transform: Step | None = None,
    options: StreamOptions | None = None,
) -> "EventStream[ResultT]": ...


def stream_events(
    store: LightningStore,
    handle: Handler[object] | None = None,
    *,
    mode: StreamMode = "realtime",
    consumers: int = 1,
    transform: Step | None = None,
    options: StreamOptions | None = None,
) -> "EventStream[Any]":
    """The events of a store in batches, or what `handle` makes of each batch; history first, then what comes.

    Args:
        handle: Called with every batch; what it raises is raised to the reader and ends the stream.
        mode: `realtime` hands out the events of each span at once. `batch` waits until a batch is full or its first
            event has waited long enough. `hybrid` is `batch`, but a reward or an error does not wait.
        consumers: How many batches are handled at the same time.
        transform: Filters and changes the events before they are put into batches.
    """
    if mode not in STREAM_MODES:
        raise ConfigurationError(f"mode is '{mode}'; use one of {list(STREAM_MODES)}.")
    if consumers < 1:
        raise ConfigurationError(f"consumers is {consumers}; a stream needs at least one.")
    options = options or StreamOptions()
    chunks = _Follower(store, options, transform or pipeline()).chunks()
    return EventStream(_batches(chunks, mode, options), handle or _unchanged, consumers)


async def _unchanged(batch: Batch) -> Batch:
    return batch


async def _rollouts(store: LightningStore, rollout_ids: Collection[str] | None) -> AsyncIterator[Rollout]:
    """Rollouts page by page, in the order of their creation, which new ones do not disturb."""
    ids = None if rollout_ids is None else sorted(rollout_ids)
    offset = 0
    while page := await store.query_rollouts(rollout_id_in=ids, limit=PAGE_SIZE, offset=offset):
        for rollout in page:
            yield rollout
        offset += len(page)


# ---------------------------------------------------------------------- reading


class _Follower:
    """Reads the spans of a store as they come."""

    def __init__(self, store: LightningStore, options: StreamOptions, transform: Step) -> None:
        self._store = store
        self._transform = transform
        self._wanted = None if options.rollout_ids is None else frozenset(options.rollout_ids)
        self._unfinished_rollouts = set(self._wanted or ())
        """Of the wanted rollouts, those that are not known to be finished and read to their end."""
        self._positions: dict[str, int] = {}
        """How many spans of each rollout were read."""
        self._evicted: set[str] = set()
        self._changes: dict[str, set[str]] = {}
        """Why a rollout must be looked at again: `finished`, `changed` status, `opened` spans."""
        self._started: dict[str, dict[str, Span | None]] = {}
        """By rollout and span id, the open spans that were reported; None once they were reported as unfinished."""
        self._names: OrderedDict[str, AgentNames] = OrderedDict()
        self._has_changed = asyncio.Event()

    async def chunks(self) -> AsyncGenerator[Batch, None]:
        """The events of each span; ends if rollouts were named and all of them are finished."""
        notices: Any = self._store.subscribe(["rollout", "span"])
        listening = asyncio.create_task(self._listen(notices), name="agl-event-follower")
        try:
            await self._look_at_everything()
            while self._wanted is None or self._unfinished_rollouts:
                while self._changes:
                    async with aclosing(self._read(next(iter(self._changes)))) as found:
                        async for chunk in found:
                            yield chunk
                if listening.done():
                    listening.result()
                if self._wanted is None or self._unfinished_rollouts:
                    await self._has_changed.wait()
                    self._has_changed.clear()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await notices.aclose()

    async def _listen(self, notices: AsyncIterator[Notice]) -> None:
        try:
            async for notice in notices:
                if notice.kind == "gap":
                    await self._look_at_everything()
                elif notice.rollout_id is not None:
                    kind = "changed" if notice.kind == "rollout" else "opened" if notice.status == "open" else ""
                    is_over = notice.status in FINAL_ROLLOUT_STATUSES
                    self._note(notice.rollout_id, kind, "finished" if is_over else "")
        finally:
            self._has_changed.set()

    async def _look_at_everything(self) -> None:
        async for rollout in _rollouts(self._store, self._wanted):
            self._note(rollout.rollout_id, "changed", "finished" if is_finished(rollout) else "opened")

    def _note(self, rollout_id: str, *reasons: str) -> None:
        if self._wanted is None or rollout_id in self._wanted:
            self._changes.setdefault(rollout_id, set()).update(reasons)
            self._has_changed.set()

    async def _read(self, rollout_id: str) -> AsyncGenerator[Batch, None]:
        """What is new in one rollout."""
        reasons = self._changes.pop(rollout_id)
        started = self._started.setdefault(rollout_id, {})
        open_spans: Sequence[Span] | None = None
        if "opened" in reasons or ("changed" in reasons and started):
            open_spans = await self._store.query_open_spans(rollout_id)
            for span in open_spans:
                if span.span_id not in started:
                    started[span.span_id] = span
                    yield self._batch(self._starts(span))
        page: Sequence[Span] | None = None
        while page is None or len(page) == PAGE_SIZE:
            offset = self._positions.get(rollout_id, 0)
            try:
                page = await self._store.query_spans(rollout_id, offset=offset, limit=PAGE_SIZE, sort_by=None)
            except SpansEvicted:
                if rollout_id not in self._evicted:
                    self._evicted.add(rollout_id)
                    message = f"Spans of rollout '{rollout_id}' were dropped before they were read."
                    lost = ErrorEvent(rollout_id=rollout_id, error_type=SpansEvicted.__name__, message=message)
                    yield self._batch([lost])
                break
            for span in page:
                self._positions[rollout_id] = self._positions.get(rollout_id, 0) + 1
                events = self._events_of(span)
                if span.span_id in started:
                    del started[span.span_id]
                    events = [event for event in events if not isinstance(event, StartEvent)]
                yield self._batch(events)
        for span_id, begun in list(started.items()) if open_spans is not None else ():
            if begun is not None and all(span.span_id != span_id for span in open_spans or ()):
                started[span_id] = None  # should it end after all, its beginning is not reported again
                yield self._batch([_unfinished(start) for start in self._starts(begun)])
        if "finished" in reasons:
            self._unfinished_rollouts.discard(rollout_id)

    def _batch(self, events: Sequence[AgentEvent]) -> Batch:
        return tuple(self._transform(events))

    def _events_of(self, span: Span) -> list[AgentEvent]:
        names = self._names.setdefault(span.rollout_id, AgentNames())
        self._names.move_to_end(span.rollout_id)
        # Those with the latest spans are remembered.
        if len(self._names) > 1000:
            self._names.popitem(last=False)
        names.add(span)
        return events_of(span, agent=names.of(span))

    def _starts(self, span: Span) -> list[AgentEvent]:
        return [event for event in self._events_of(span) if isinstance(event, StartEvent)]


def _unfinished(start: AgentEvent) -> ErrorEvent:
    """The end of a step that never ended."""
    source = {each.name: getattr(start, each.name) for each in fields(start)}
    message = f"'{start.span_name}' had not ended when its attempt was over."
    return ErrorEvent(**{**source, "time": None, "message": message})


# ---------------------------------------------------------------------- batches


async def _batches(
    chunks: AsyncGenerator[Batch, None], mode: StreamMode, options: StreamOptions
) -> AsyncGenerator[Batch, None]:
    """The events of spans joined into batches, none of which is empty."""
    loop = asyncio.get_running_loop()
    batch: Batch = ()
    deadline = 0.0
    reading: asyncio.Task[Batch | None] | None = None
    try:
        while True:
            # A task, because a reading that has begun goes on when the batch is handed out before it is done.
            reading = reading or asyncio.create_task(_next(chunks), name="agl-event-reader")
            await asyncio.wait([reading], timeout=max(deadline - loop.time(), 0) if batch else None)
            has_waited = not reading.done()
            chunk = () if has_waited else reading.result()
            reading = reading if has_waited else None
            if batch and (chunk is None or has_waited or len(batch) + len(chunk) > options.batch_size):
                yield batch
                batch = ()
            if chunk is None:
                return
            if not batch:
                deadline = loop.time() + options.batch_seconds
            batch += chunk
            if batch and _is_due(batch, mode, options):
                yield batch
                batch = ()
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await chunks.aclose()


async def _next(chunks: AsyncIterator[Batch]) -> Batch | None:
    return await anext(chunks, None)


def _is_due(batch: Batch, mode: StreamMode, options: StreamOptions) -> bool:
    if mode == "realtime" or len(batch) >= options.batch_size:
        return True
    return mode == "hybrid" and any(isinstance(event, (RewardEvent, ErrorEvent)) for event in batch)


# ---------------------------------------------------------------------- handling


class EventStream(AsyncIterator[ResultT], Generic[ResultT]):
    """Results of a stream, in the order of its batches. A reader that is cancelled while it waits loses none."""

    def __init__(self, batches: AsyncGenerator[Batch, None], handle: Handler[ResultT], consumers: int) -> None:
        self._batches = batches
        self._handle = handle
        self._free = asyncio.Semaphore(consumers)
        self._handled: deque[asyncio.Task[ResultT]] = deque()
        """Batches whose results were not handed out yet, oldest first."""
        self._work: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def __anext__(self) -> ResultT:
        if self._work is None and not self._is_closed:
            self._work = asyncio.create_task(self._run(), name="agl-event-stream")
        while not self._is_closed:
            if self._handled and self._handled[0].done():
                task = self._handled.popleft()
                self._free.release()
                if task.exception() is not None:
                    await self.aclose()
                return task.result()
            if not self._handled and self._work is not None and self._work.done():
                await self.aclose()
                self._work.result()
            elif self._handled:
                await asyncio.wait([self._handled[0]])
            else:
                self._has_changed.clear()
                await self._has_changed.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the stream; batches that are being handled are cancelled."""
        self._is_closed = True
        self._has_changed.set()
        running: list[asyncio.Task[object]] = [*self._handled]
        if self._work is not None:
            running.append(self._work)
        self._handled.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self) -> None:
        """Read batches, and have each handled as soon as a consumer is free."""
        try:
            async with aclosing(self._batches):
                async for batch in self._batches:
                    await self._free.acquire()
                    task = asyncio.create_task(_awaited(self._handle(batch)), name="agl-event-handler")
                    self._handled.append(task)
                    self._has_changed.set()
        finally:
            self._has_changed.set()


async def _awaited(work: Awaitable[ResultT]) -> ResultT:
    return await work
