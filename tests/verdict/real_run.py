"""A real run whose verdict is known: what it must say, and what it must not."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

HEALTHY_OUTCOMES: Final = ("gained",)
BLAMING: Final = ("Nothing was gained", "failed", "did not")
"""Words that a healthy run must not be told."""


@dataclass(frozen=True, kw_only=True)
class RealRun(ABC):
    """Something to run, and the verdict that is right."""

    finding: str | None
    """The first finding; None for a run in which nothing is wrong."""
    outcomes: Sequence[str] = ()
    """One of these is right; by default that of a healthy run is a gain, and that of a fault is anything else."""
    words: Sequence[str] = ()
    """All of them stand in the sentence."""
    unsaid: Sequence[str] = ()
    """None of them does."""

    @abstractmethod
    def judged(self) -> dict[str, Any]:
        """Run it; the verdict, as the summary of a run has it."""

    def errors(self, verdict: dict[str, Any]) -> list[str]:
        """Everything that is wrong with a verdict on this run."""
        sentence, outcome = verdict["sentence"], verdict["outcome"]
        first = next((finding["name"] for finding in verdict["findings"]), None)
        is_right = outcome in (self.outcomes or HEALTHY_OUTCOMES) if self.finding is None else outcome != "gained"
        if self.outcomes:
            is_right = outcome in self.outcomes
        unsaid = [*self.unsaid, *(BLAMING if self.finding is None and not self.words else ())]
        return [
            *([] if first == self.finding else [f"the first finding is {first}, not {self.finding}"]),
            *([] if is_right else [f"the outcome is {outcome}"]),
            *(f"it does not say {words!r}" for words in self.words if words not in sentence),
            *(f"it says {words!r}" for words in unsaid if words in sentence),
        ]
