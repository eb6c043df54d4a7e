"""The buffer between reading and handling: bounded, and cut into batches by the mode of the stream.

What one span says stays together, so that a place in the stream is a number of spans. Whoever puts waits while the
buffer is full, and whoever takes waits until a batch is due.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agentlightning.errors import ConfigurationError
from agentlightning.events.event import AgentEvent, ErrorEvent, RewardEvent

__all__ = ["Batch", "EventBuffer", "Parcel", "StreamMode", "StreamOptions"]

StreamMode = Literal["realtime", "batch", "hybrid"]
STREAM_MODES: tuple[StreamMode, ...] = ("realtime", "batch", "hybrid")
Batch: TypeAlias = tuple[AgentEvent, ...]
_FULL_BATCHES = 4
"""The buffer holds so many full batches before reading pauses."""


@dataclass(frozen=True)
class StreamOptions:
    """Which part of a store a stream follows, and how large its batches are."""

    rollout_ids: Collection[str] | None = None
    """Only these rollouts; the stream ends when all of them are finished. None follows every rollout, for ever."""
    positions: Mapping[str, int] = field(default_factory=dict)
    """How many spans of each rollout to pass over, as `EventStream.positions` gave them; others are read from the
    first span on."""
    batch_size: int = 100
    """Most events in a batch; only a span that says more by itself exceeds it."""
    batch_seconds: float = 0.5
    """Longest time an event waits for its batch to fill."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_seconds < 0:
            raise ConfigurationError(
                f"batch_size is {self.batch_size} and batch_seconds {self.batch_seconds}; "
                "use at least one event and at least 0 seconds."
            )


@dataclass(frozen=True)
class Parcel:
    """Events that stay together, and the positions that are reached with them."""

    events: Batch
    positions: Mapping[str, int]


class EventBuffer:
    """One writer, one reader."""

    def __init__(self, mode: StreamMode, options: StreamOptions) -> None:
        self._mode = mode
        self._options = options
        self._parcels: deque[Parcel] = deque()
        self._events = 0
        self._urgent = 0
        self._is_closed = False
        self._has_changed = asyncio.Event()
        self._has_room = asyncio.Event()

    async def put(self, parcel: Parcel) -> None:
        """Append a parcel when there is room."""
        while self._events >= self._options.batch_size * _FULL_BATCHES:
            self._has_room.clear()
            await self._has_room.wait()
        # Positions without events travel with their neighbours: behind events, or before the first ones.
        if self._parcels and not (parcel.events and self._parcels[-1].events):
            last = self._parcels.pop()
            parcel = Parcel(last.events + parcel.events, {**last.positions, **parcel.positions})
            self._count(last, -1)
        self._parcels.append(parcel)
        self._count(parcel, 1)
        self._has_changed.set()

    def close(self) -> None:
        """Nothing more will come; what is there is given out."""
        self._is_closed = True
        self._has_changed.set()

    async def take(self) -> Parcel | None:
        """The next batch, with events unless it is the last; None at the end."""
        while not self._events and not self._is_closed:
            self._has_changed.clear()
            await self._has_changed.wait()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.batch_seconds
        while not self._is_due() and (remaining := deadline - loop.time()) > 0:
            self._has_changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_changed.wait(), remaining)
        return self._cut()

    def _is_due(self) -> bool:
        if self._is_closed or self._mode == "realtime" or self._events >= self._options.batch_size:
            return True
        return self._mode == "hybrid" and self._urgent > 0

    def _cut(self) -> Parcel | None:
        if not self._parcels:
            return None
        cut = self._pop()
        while self._mode != "realtime" and self._parcels:
            if len(cut.events) + len(self._parcels[0].events) > self._options.batch_size:
                break
            more = self._pop()
            cut = Parcel(cut.events + more.events, {**cut.positions, **more.positions})
        self._has_room.set()
        return cut

    def _pop(self) -> Parcel:
        parcel = self._parcels.popleft()
        self._count(parcel, -1)
        return parcel

    def _count(self, parcel: Parcel, sign: int) -> None:
        self._events += sign * len(parcel.events)
        self._urgent += sign * sum(isinstance(event, (RewardEvent, ErrorEvent)) for event in parcel.events)
