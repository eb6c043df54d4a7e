"""How far one call has come: its tries, what is left of its patience, and the words for its end."""

import random
from typing import Final

from agentlightning.llm_proxy.backends.asking import Ask
from agentlightning.llm_proxy.backends.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    Try,
)
from agentlightning.llm_proxy.backends.lane import Lane, first_line
from agentlightning.llm_proxy.backends.retries import backoff_seconds
from agentlightning.llm_proxy.backends.routing import Group

__all__ = ["Course"]

_CLOSING: Final = "The proxy is closing and asks no backend any more."


class Course:
    """One call on its way through the fleet."""

    __slots__ = (
        *("_pauses", "_retries_left", "_spent", "ask", "deadline", "group", "tried", "tries", "unfit"),
        "waited_seconds",
    )

    def __init__(self, ask: Ask, deadline: float, num_retries: int, group: Group) -> None:
        self.ask = ask
        self.deadline = deadline
        self.group = group
        """The backends that may serve it."""
        self.tries: list[Try] = []
        self.tried: list[Lane] = []
        """Backends that failed it."""
        self.unfit: list[Lane] = []
        """Backends that do not speak its dialect."""
        self.waited_seconds = 0.0
        self._retries_left = num_retries
        self._pauses = 0
        self._spent: set[str] = set()

    def choose(self, now: float) -> Lane | None:
        return self.group.choose(self.ask.who, now, tried=self.tried, unfit=self.unfit)

    @property
    def has_fit(self) -> bool:
        """Whether a backend is left that may speak its dialect."""
        return any(lane not in self.unfit for lane in self.group.lanes)

    def note(self, lane: Lane, words: str) -> None:
        """Add a try to the record."""
        self.tries.append(Try(lane.backend.name, first_line(lane.backend.redacted(words))))

    def takes_spare(self, kind: str, now: float) -> bool:
        """Use a free try, of which there is one for each way in which no backend can have begun to work on it."""
        is_harmless = kind == "stale" or (kind == "refused" and self._has_other(now))
        if kind in self._spent or not is_harmless:
            return False
        self._spent.add(kind)
        return True

    def pause(self, now: float, chance: random.Random) -> float | None:
        """Seconds before the next try, which this counts; None if there shall be no other."""
        if self._retries_left == 0:
            return None
        seconds = 0.0
        if not self._has_other(now):
            fit = [lane for lane in self.group.lanes if lane not in self.unfit]
            held_seconds = min((lane.gate.closed_for(now) for lane in fit), default=0.0)
            if held_seconds == 0:  # else the line of the backend is where to wait
                seconds = backoff_seconds(self._pauses, chance)
                self._pauses += 1
            if now + max(seconds, held_seconds) >= self.deadline:
                return None
        self._retries_left -= 1
        return seconds

    def closing(self) -> BackendUnavailable:
        return BackendUnavailable(_CLOSING, tries=self.tries)

    def too_late(self, where: str) -> DeadlineExceeded:
        """The call's time was over there."""
        words = f"The deadline of the call passed {where}{self._told_tries()}."
        return DeadlineExceeded(words, tries=self.tries)

    def on_hold(self, lane: Lane, seconds: float) -> BackendUnavailable:
        """The least patient of all backends wants to be left alone for longer than the call has time."""
        words = (
            f"No backend of model '{self.ask.model}' may be asked before the call's deadline: '{lane}' is at its rate "
            f"limit for another {seconds:.1f} s{self._told_tries()}."
        )
        return BackendUnavailable(words, tries=self.tries, retry_after_seconds=seconds)

    def unavailable(self, now: float) -> BackendUnavailable:
        """No backend answered, and no other try shall be made."""
        tried = {happened.backend for happened in self.tries}
        told = [f"{happened.backend} {happened.happened}" for happened in self.tries]
        told += [self._state_of(lane, now) for lane in self.group.lanes if lane.backend.name not in tried]
        opening = min((max(lane.breaker.opens_until - now, 0.0) for lane in self.group.lanes), default=0.0)
        return BackendUnavailable(
            f"No backend of model '{self.ask.model}' answered: {'; '.join(told)}.",
            tries=self.tries,
            retry_after_seconds=opening or None,
        )

    def _has_other(self, now: float) -> bool:
        return self.group.has_other(self.tried, self.unfit, now)

    def _state_of(self, lane: Lane, now: float) -> str:
        name = lane.backend.name
        if lane in self.unfit:
            return f"{name} does not speak the dialect of the call"
        if lane.breaker.state != "closed":
            seconds = max(lane.breaker.opens_until - now, 0.0)
            return f"{name} is out of use for another {seconds:.1f} s; its last failure: {lane.last_error}"
        return f"{name} was not asked"

    def _told_tries(self) -> str:
        if not self.tries:
            return ""
        return " after " + "; ".join(f"{one.backend} {one.happened}" for one in self.tries)
