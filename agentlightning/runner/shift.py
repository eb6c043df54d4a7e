"""A shift: one time that a runner works off the queue, and how much it may still claim."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Shift"]


@dataclass
class Shift:
    """Keeps count of what is claimed, also where several claim at once."""

    goes_on: Callable[[], bool]
    """Whether anything more may be claimed now: not once the runner is to stop, or while it pauses."""
    left: int | None = None
    """How many rollouts may still be claimed; None sets no bound.

    Below zero when more came than were asked for: with them the answer to an earlier request, which had got lost.
    """

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left to claim."""
        return self.left is not None and self.left <= 0

    def reserve(self, count: int) -> int:
        """Set out to claim so many; returns how many of them may be claimed."""
        if self.left is None:
            return count
        granted = max(min(count, self.left), 0)
        self.left -= granted
        return granted

    def release(self, count: int) -> None:
        """Those were not claimed after all."""
        if self.left is not None:
            self.left += count
