"""The gate of one backend: how many calls may be in it, how many may start in a minute, and who is next.

Calls that cannot enter wait in line: one line for each rollout, first come first served, and the lines take turns, so
that a rollout with many calls does not keep the others waiting. A call that enters at once touches no future and no
timer.
"""

import asyncio
from collections import deque
from enum import Enum
from typing import Final

from agentlightning.llm_proxy.backends.clock import Alarm, Clock

__all__ = ["Admission", "Gate"]

WINDOW_SECONDS: Final = 60.0


class Admission(Enum):
    """How waiting at a gate ended."""

    ENTERED = "entered"
    SENT_AWAY = "sent away"
    """The backend went out of use; another one may be better."""
    EXPIRED = "expired"
    """The call's deadline came first."""


class _Window:
    """What was used up in the last minute, where that is limited."""

    __slots__ = ("_limit", "_total", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._used: deque[tuple[float, int]] = deque()

    def add(self, now: float, amount: int) -> None:
        self._used.append((now, amount))
        self._total += amount

    def closed_for(self, now: float) -> float:
        """Seconds until there is room again; 0 if there is."""
        self._forget(now)
        left = self._total
        for moment, amount in self._used:
            if left < self._limit:
                return 0.0
            left -= amount
            if left < self._limit:
                return moment + WINDOW_SECONDS - now
        return 0.0

    def _forget(self, now: float) -> None:
        while self._used and self._used[0][0] <= now - WINDOW_SECONDS:
            self._total -= self._used.popleft()[1]


class Gate:
    """Who may be in one backend."""

    def __init__(self, clock: Clock, *, cap: int | None = None, rpm: int | None = None, tpm: int | None = None) -> None:
        self.in_flight = 0
        self.waiting = 0
        self._clock = clock
        self._cap = float("inf") if cap is None else cap
        self._calls = None if rpm is None else _Window(rpm)
        self._tokens = None if tpm is None else _Window(tpm)
        self._held_until = float("-inf")
        self._lines: dict[str, deque[asyncio.Future[Admission]]] = {}
        """In the order in which they are served next."""
        self._alarm: Alarm | None = None

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self._cap

    def closed_for(self, now: float) -> float:
        """Seconds for which nobody may enter, by the wish of the backend or its limits; 0 if there are none."""
        seconds = max(self._held_until - now, 0.0)
        if self._calls is not None:
            seconds = max(seconds, self._calls.closed_for(now))
        if self._tokens is not None:
            seconds = max(seconds, self._tokens.closed_for(now))
        return seconds

    def enter_at_once(self, now: float) -> bool:
        """Enter, if there is room and nobody waits."""
        if self._lines or self.in_flight >= self._cap or self.closed_for(now) > 0:
            return False
        self._count(now)
        return True

    async def enter(self, who: str, deadline: float) -> Admission:
        """Wait in line; a caller that is cancelled leaves it."""
        place: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(who, deque()).append(place)
        self.waiting += 1
        expiry = self._clock.call_later(max(deadline - self._clock.now(), 0.0), lambda: self._expire(who, place))
        self._admit()
        try:
            return await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._remove(who, place)
            elif place.result() is Admission.ENTERED:  # let in at the moment of the cancellation
                self.leave()
            raise
        finally:
            expiry.cancel()

    def leave(self) -> None:
        """Give the place back."""
        self.in_flight -= 1
        if self._lines:
            self._admit()

    def hold(self, until: float) -> None:
        """Let nobody enter before then; those in line are sent away to find another backend, or to come back."""
        self._held_until = max(self._held_until, until)
        self.send_away()

    def use_tokens(self, count: int) -> None:
        """Count tokens that a call used up."""
        if self._tokens is not None:
            self._tokens.add(self._clock.now(), count)

    def send_away(self) -> None:
        """Tell all in line to look for another backend."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            self.waiting -= len(line)
            for place in line:
                if not place.done():
                    place.set_result(Admission.SENT_AWAY)
        self._silence()

    def _count(self, now: float) -> None:
        self.in_flight += 1
        if self._calls is not None:
            self._calls.add(now, 1)

    def _admit(self) -> None:
        """Let in as many as may enter now, and come back when time alone stands in the way."""
        self._silence()
        while self._lines and self.in_flight < self._cap:
            now = self._clock.now()
            seconds = self.closed_for(now)
            if seconds > 0:
                self._alarm = self._clock.call_later(seconds, self._admit)
                return
            who = next(iter(self._lines))
            line = self._lines.pop(who)
            place = line.popleft()
            if line:
                self._lines[who] = line
            self.waiting -= 1
            if not place.done():
                self._count(now)
                place.set_result(Admission.ENTERED)

    def _expire(self, who: str, place: asyncio.Future[Admission]) -> None:
        if not place.done():
            self._remove(who, place)
            place.set_result(Admission.EXPIRED)

    def _remove(self, who: str, place: asyncio.Future[Admission]) -> None:
        line = self._lines.get(who)
        if line is None or place not in line:
            return
        line.remove(place)
        self.waiting -= 1
        if not line:
            del self._lines[who]
        if not self._lines:
            self._silence()

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
