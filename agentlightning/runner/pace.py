"""The pace of a runner: how many claims are worth having ahead of its agents."""

from typing import Final

__all__ = ["Pace"]

WEIGHT: Final = 0.05
"""Of the latest time in a mean."""
MARGIN: Final = 2.0
"""What is needed on average, times this: agents that end together need more at once."""
FIRST_GUESS_SECONDS: Final = 0.01
"""For what the store takes to answer."""


class Pace:
    """Mean times: how long agents work, and how long after its agent's end an attempt brings the next claim."""

    def __init__(self) -> None:
        self._working: float | None = None
        self._waiting = FIRST_GUESS_SECONDS

    def worked(self, seconds: float) -> None:
        """An agent has worked so long."""
        self._working = seconds if self._working is None else _mean(self._working, seconds)

    def waited(self, seconds: float) -> None:
        """The next claim came so long after an agent had ended."""
        self._waiting = _mean(self._waiting, seconds)

    def worth_ahead(self, size: int) -> int:
        """How many claims so many agents use up while the store answers: none, where agents take long."""
        if self._working is None:
            return 0
        needed = MARGIN * size * self._waiting
        return size if needed >= self._working * size else round(needed / self._working)


def _mean(mean: float, latest: float) -> float:
    return mean + WEIGHT * (latest - mean)
