"""A circuit breaker: after failures in a row, a backend is left alone for a while and then tried with care.

Closed, calls pass. Open, they do not, until the hold is over; the next call is then the probe (half-open). An answer
that begins closes the breaker on probation: a single failure opens it again, with twice the hold, until an answer has
come to its end. Rules only: the time is told to it, and nobody is woken by it.
"""

from typing import Final, Literal

__all__ = ["Breaker", "BreakerState"]

BreakerState = Literal["closed", "open", "half-open"]

FAILURES_TO_OPEN: Final = 5
FIRST_HOLD_SECONDS: Final = 10.0
LONGEST_HOLD_SECONDS: Final = 60.0
_NEVER: Final = float("-inf")


class Breaker:
    """What is known of the health of one backend."""

    __slots__ = (
        *("_hold_seconds", "_was_cured", "failures", "is_curable", "opened_at", "opens_until", "state"),
        "touched_at",
    )

    def __init__(self) -> None:
        self.state: BreakerState = "closed"
        self.failures = 0
        """In a row, up to now."""
        self.opened_at = _NEVER
        """When it left the closed state."""
        self.opens_until = _NEVER
        """When a probe may be sent."""
        self.touched_at = _NEVER
        """When a call last failed, or began while it was not closed."""
        self.is_curable = False
        """Whether the backend could not be reached, so that being reached again is all it needs."""
        self._hold_seconds = FIRST_HOLD_SECONDS
        self._was_cured = False

    def allows(self, now: float) -> bool:
        """Whether a call may be sent."""
        return self.state == "closed" or (self.state == "open" and now >= self.opens_until)

    def begin(self, now: float) -> None:
        """A call is being sent; one sent while it is not closed is the probe."""
        if self.state != "closed":
            self.state = "half-open"
            self.touched_at = now

    def answered(self) -> None:
        """An answer began: the backend is there."""
        if self.state != "closed":
            self.state = "closed"
            self.failures = FAILURES_TO_OPEN - 1

    def completed(self) -> None:
        """An answer came to its end: the backend is well."""
        if self.state == "closed":
            self.failures = 0
            self._hold_seconds = FIRST_HOLD_SECONDS
            self._was_cured = False

    def abandoned(self, now: float) -> None:
        """A call ended without saying anything about the backend; a probe has to be made again."""
        if self.state == "half-open":
            self.state = "open"
            self.opens_until = now

    def failed(self, now: float, *, curable: bool) -> bool:
        """A call failed; True if that opened the breaker."""
        self.failures += 1
        self.touched_at = now
        self.is_curable = curable and not self._was_cured
        if self.state == "open" or (self.state == "closed" and self.failures < FAILURES_TO_OPEN):
            return False
        if self.state == "closed":
            self.opened_at = now
        self.state = "open"
        self._was_cured = False  # one that relapsed proves itself with a probe, and may be cured the next time
        self.opens_until = now + self._hold_seconds
        self._hold_seconds = min(2 * self._hold_seconds, LONGEST_HOLD_SECONDS)
        return True

    def cured(self) -> bool:
        """A backend that could not be reached answers its health check again; True if that brings it back."""
        if self.state != "open" or not self.is_curable:
            return False
        self.answered()
        self._was_cured = True
        return True
