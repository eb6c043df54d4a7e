"""Counting calls: what is under way, waits for the store, is stored, or is lost, for each attempt and for all.

The counts are kept for a while after an attempt has ended, so that whoever asks twice hears the same. Their number is
bounded, and so is what is remembered of reasons, since callers choose the ids that stand in them.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from agentlightning.llm_proxy.records import Origin

__all__ = ["AttemptLedger", "Ledgers"]

MOST_LEDGERS: Final = 10_000
MOST_REASONS: Final = 16
OTHER_REASONS: Final = "other reasons"


@dataclass(slots=True)
class AttemptLedger:
    """The calls of one attempt, counted."""

    in_flight: int = 0
    waiting: int = 0
    """Finished, and not stored yet."""
    stored: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """By reason."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is under way."""
        return not (self.in_flight or self.waiting)

    def lose(self, reason: str) -> None:
        if reason not in self.lost and len(self.lost) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.lost[reason] += 1


class Ledgers:
    """The ledgers of all attempts, and their sum."""

    def __init__(self, most: int = MOST_LEDGERS) -> None:
        self.totals = AttemptLedger()
        self._most = most
        self._by_attempt: dict[tuple[str, str], AttemptLedger] = {}

    def __len__(self) -> int:
        return len(self._by_attempt)

    def of(self, origin: Origin) -> AttemptLedger:
        """Of one attempt; empty, if nothing is known of it."""
        return self._by_attempt.get((origin.rollout_id, origin.attempt_id)) or AttemptLedger()

    def begin(self, origin: Origin) -> None:
        """A call has come in."""
        for ledger in (self._kept(origin), self.totals):
            ledger.in_flight += 1

    def finish(self, origin: Origin) -> None:
        """A call was answered, or will not be."""
        for ledger in (self._kept(origin), self.totals):
            ledger.in_flight -= 1
            ledger.waiting += 1

    def find(self, origin: Origin) -> None:
        """A call of an earlier process was found."""
        for ledger in (self._kept(origin), self.totals):
            ledger.waiting += 1

    def store(self, origin: Origin) -> None:
        for ledger in (self._kept(origin), self.totals):
            ledger.waiting -= 1
            ledger.stored += 1

    def lose(self, origin: Origin, reason: str) -> None:
        """A call that waited is given up; of the sum only the kind of reason is kept, which stands before a colon."""
        ledger = self._kept(origin)
        ledger.waiting -= 1
        ledger.lose(reason)
        self.totals.waiting -= 1
        self.totals.lose(reason.partition(":")[0])

    def _kept(self, origin: Origin) -> AttemptLedger:
        place = (origin.rollout_id, origin.attempt_id)
        ledger = self._by_attempt.get(place)
        if ledger is None:
            if len(self._by_attempt) >= self._most:
                self._forget_oldest()
            ledger = self._by_attempt[place] = AttemptLedger()
        return ledger

    def _forget_oldest(self) -> None:
        """A tenth at once, so that not every new attempt has to look for one to forget."""
        idle = [place for place, ledger in self._by_attempt.items() if ledger.is_idle]
        for place in idle[: max(self._most // 10, 1)]:
            del self._by_attempt[place]
