"""A real run whose verdict is known: what it must say, and what it must not."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

GAINED: Final = ("gained",)
NOT_GAINED: Final = ("no gain", "lost", "unknown")
BLAMING: Final = ("Nothing was gained", "failed", "did not")
"""Words that a healthy run must not be told."""


@dataclass(frozen=True, kw_only=True)
class RealRun(ABC):
    """Something to run, and the verdict that is right."""

    finding: str | None
    """The first finding; None where there is none, because nothing is wrong or because the run's error says it all."""
    outcomes: Sequence[str] = ()
    """One of these is right; by default that of a healthy run is a gain, and that of a fault is anything else."""
    words: Sequence[str] = ()
    """All of them stand in the sentence."""
    unsaid: Sequence[str] = ()
    """None of them does."""

    @abstractmethod
    def judged(self) -> dict[str, Any]:
        """Run it; the verdict, as the summary of a run has it."""

    def errors(self, verdict: dict[str, Any], *, is_healthy: bool) -> list[str]:
        """Everything that is wrong with a verdict on this run; a healthy one is not to be blamed."""
        sentence, outcome = verdict["sentence"], verdict["outcome"]
        first = next((finding["name"] for finding in verdict["findings"]), None)
        unsaid = [*self.unsaid, *(BLAMING if is_healthy else ())]
        outcomes = self.outcomes or (GAINED if is_healthy else NOT_GAINED)
        return [
            *([] if first == self.finding else [f"the first finding is {first}, not {self.finding}"]),
            *([] if outcome in outcomes else [f"the outcome is {outcome}"]),
            *(f"it does not say {words!r}" for words in self.words if words not in sentence),
            *(f"it says {words!r}" for words in unsaid if words in sentence),
        ]
