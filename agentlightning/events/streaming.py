"""Streams of events out of a store, as they happen.

    async with stream_events(store, learn, mode="hybrid", consumers=4, transform=of_kind("reward")) as results:
        async for result in results:
            ...

A follower reads spans, a buffer cuts batches, and up to `consumers` batches are handled at a time. Results come in the
order of their batches. Every span is handed out once; within a rollout, in the order of its arrival in the store. What
was handed out is counted in `positions`, with which a later stream goes on.

A step that takes a while is told of when it begins: its `StartEvent` comes then, and everything else it says when it
ends. If its attempt is over before that, it ends with an `ErrorEvent`. A stream that goes on at a position begins with
the steps that are open then.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, overload

from typing_extensions import Self

from agentlightning.errors import ConfigurationError, SpansEvicted
from agentlightning.events.batching import STREAM_MODES, Batch, EventBuffer, Parcel, StreamMode, StreamOptions
from agentlightning.events.event import AgentEvent, ErrorEvent, StartEvent
from agentlightning.events.follower import Arrival, SpanFollower
from agentlightning.events.pipeline import Step, pipeline
from agentlightning.events.reading import AgentNames, events_of
from agentlightning.store import LightningStore

__all__ = ["EventStream", "Handler", "stream_events"]

ResultT = TypeVar("ResultT")
Handler = Callable[[Batch], Awaitable[ResultT]]

MOST_NAMED_ROLLOUTS = 1000
"""Of so many rollouts, those with the latest spans, a stream remembers which agent worked in which span."""


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
    handle: Handler[Any] | None = None,
    *,
    mode: StreamMode = "realtime",
    consumers: int = 1,
    transform: Step | None = None,
    options: StreamOptions | None = None,
) -> "EventStream[Any]":
    """The events of a store in batches, or what `handle` makes of each batch; history first, then what comes.

    Args:
        handle: Called with every batch; what it raises is raised to the reader and ends the stream.
        mode: `realtime` hands out the events of one span as soon as they are there. `batch` waits until a batch is
            full or its first event has waited long enough. `hybrid` is `batch`, but a reward or an error is not kept
            waiting.
        consumers: How many batches are handled at the same time.
        transform: Filters and changes the events before they are put into batches.
    """
    if mode not in STREAM_MODES:
        raise ConfigurationError(f"mode is '{mode}'; use one of {list(STREAM_MODES)}.")
    if consumers < 1:
        raise ConfigurationError(f"consumers is {consumers}; a stream needs at least one.")
    given = options or StreamOptions()
    reading = _reading(store, given, transform or pipeline())
    stream = EventStream(reading, EventBuffer(mode, given), handle or _as_it_is, most=consumers)
    stream.positions.update(given.positions)
    return stream


async def _as_it_is(batch: Batch) -> object:
    return batch


# ---------------------------------------------------------------------- reading


async def _reading(store: LightningStore, options: StreamOptions, transform: Step) -> AsyncGenerator[Parcel, None]:
    """What the spans of a store say, span by span."""
    names: OrderedDict[str, AgentNames] = OrderedDict()
    follower = SpanFollower(store, rollout_ids=options.rollout_ids, positions=options.positions)
    async with follower, aclosing(follower.arrivals()) as arrivals:
        async for arrival in arrivals:
            events = transform(_events_of(arrival, names))
            yield Parcel(tuple(events), {arrival.rollout_id: arrival.position})


def _events_of(arrival: Arrival, names: OrderedDict[str, AgentNames]) -> Iterable[AgentEvent]:
    rollout_id, span = arrival.rollout_id, arrival.span
    if span is None:
        message = f"Spans of rollout '{rollout_id}' were dropped before they were read."
        return [ErrorEvent(rollout_id=rollout_id, error_type=SpansEvicted.__name__, message=message)]
    known = names.setdefault(rollout_id, AgentNames())
    names.move_to_end(rollout_id)
    if len(names) > MOST_NAMED_ROLLOUTS:
        names.popitem(last=False)
    known.add(span)
    events = events_of(span, agent=known.of(span))
    starts = [event for event in events if isinstance(event, StartEvent)]
    if arrival.state == "open":
        return starts
    if arrival.state == "unfinished":
        return [_unfinished(start) for start in starts]
    return [event for event in events if not (arrival.was_open and event in starts)]


def _unfinished(start: StartEvent) -> ErrorEvent:
    """The end of a step that never came to one."""
    source = {field.name: getattr(start, field.name) for field in fields(start)}
    message = f"'{start.span_name}' had not ended when its attempt was over."
    return ErrorEvent(**{**source, "time": None, "message": message})


# ---------------------------------------------------------------------- handling


@dataclass(frozen=True)
class _Handling(Generic[ResultT]):
    """One batch and the work on it."""

    parcel: Parcel
    task: "asyncio.Task[ResultT]"


class EventStream(AsyncIterator[ResultT], Generic[ResultT]):
    """Results of a stream, in the order of its batches. A reader that is cancelled while it waits loses none."""

    def __init__(
        self, reading: AsyncGenerator[Parcel, None], buffer: EventBuffer, handle: Handler[ResultT], *, most: int
    ) -> None:
        self.positions: dict[str, int] = {}
        """Of each rollout, how many spans were handed out; give them to `StreamOptions` to go on from here."""
        self._reading = reading
        self._buffer = buffer
        self._handle = handle
        self._free = asyncio.Semaphore(most)
        self._handled: deque[_Handling[ResultT]] = deque()
        """Batches whose results were not handed out yet, oldest first."""
        self._last_positions: Mapping[str, int] = {}
        """Reached at the end of the stream, with spans that say nothing."""
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
        handled = await self._next_handled()
        if handled is None:
            await self._finish()
            raise StopAsyncIteration
        error = handled.task.exception()
        if error is not None:
            await self.aclose()
            raise error
        self.positions.update(handled.parcel.positions)
        self._free.release()
        return handled.task.result()

    async def aclose(self) -> None:
        """End the stream; batches that are being handled are cancelled."""
        self._is_closed = True
        self._has_changed.set()
        running: list[asyncio.Task[Any]] = [handling.task for handling in self._handled]
        if self._work is not None:
            running.append(self._work)
        self._handled.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _next_handled(self) -> _Handling[ResultT] | None:
        """The oldest batch, once it is handled; None if there will be no other."""
        while not self._is_closed:
            if not self._handled:
                if self._work is None or self._work.done():
                    return None
                self._has_changed.clear()
                await self._has_changed.wait()
            elif self._handled[0].task.done():
                return self._handled.popleft()
            else:
                await asyncio.wait([self._handled[0].task])
        return None

    async def _finish(self) -> None:
        """Close the stream, and raise what ended it if that was a failure."""
        work, was_closed = self._work, self._is_closed
        await self.aclose()
        if work is not None and not was_closed:
            work.result()
            self.positions.update(self._last_positions)

    # ------------------------------------------------------------------ in the background

    async def _run(self) -> None:
        collecting = asyncio.create_task(self._collect(), name="agl-event-reader")
        try:
            while (parcel := await self._buffer.take()) is not None:
                await self._begin(parcel)
            await collecting
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            self._has_changed.set()

    async def _collect(self) -> None:
        try:
            async with aclosing(self._reading) as parcels:
                async for parcel in parcels:
                    await self._buffer.put(parcel)
        finally:
            self._buffer.close()

    async def _begin(self, parcel: Parcel) -> None:
        """Have a batch handled as soon as somebody is free to do so."""
        await self._free.acquire()
        if not parcel.events:
            self._last_positions = parcel.positions
            return
        task = asyncio.create_task(_awaited(self._handle(parcel.events)), name="agl-event-handler")
        self._handled.append(_Handling(parcel, task))
        self._has_changed.set()


async def _awaited(work: Awaitable[ResultT]) -> ResultT:
    return await work
