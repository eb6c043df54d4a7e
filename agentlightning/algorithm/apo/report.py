"""What an optimisation came to: the prompts before and after, both scores, and how sure the gain is."""

import difflib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.apo.gain import Challenge
from agentlightning.algorithm.intervals import Estimate
from agentlightning.types import PromptTemplate
from agentlightning.utils.private_files import replaced_file

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["OptimisationResult", "counted", "tell", "write_prompts"]

logger = logging.getLogger(__name__)

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True)
class OptimisationResult:
    """The end of a run."""

    seed: Mapping[str, PromptTemplate]
    best: Mapping[str, PromptTemplate]
    best_version: str
    seed_score: float | None
    """Mean reward on the validation tasks that both were run on; None if there are none."""
    best_score: float | None
    gain: Estimate | None
    """From the seed to the best prompt, on those tasks; None if the seed is the best."""
    challenges: Sequence[Challenge] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=Counter)
    """Candidates that were rejected, answers that were empty, calls that failed."""
    stopped: str | None = None
    """Why the run ended before its last round; None if it did not."""

    @property
    def is_improved(self) -> bool:
        return dict(self.seed) != dict(self.best)

    def diff(self) -> str:
        """What changed from the seed to the best prompts; empty if nothing did."""
        return "\n".join(self._diff_lines())

    def _diff_lines(self) -> Iterator[str]:
        for name, before in self.seed.items():
            after = self.best[name].template
            yield from difflib.unified_diff(
                before.template.splitlines(), after.splitlines(), f"{name} (seed)", f"{name} (best)", lineterm=""
            )

    def headlines(self) -> list[str]:
        """The scores and what they rest on, in a few lines."""
        lines = []
        if self.is_improved:
            lines.append(f"The best prompt is {self.best_version}.")
        else:
            lines.append("The seed is still the best prompt: no candidate was found to be better.")
        if self.seed_score is not None and self.best_score is not None and self.is_improved:
            lines.append(f"Validation score: {self.seed_score:.3f} -> {self.best_score:.3f}")
        elif self.seed_score is not None:
            lines.append(f"Validation score: {self.seed_score:.3f}")
        if self.gain is not None:
            gain = self.gain
            interval = f"[{gain.low:+.3f}, {gain.high:+.3f}]"
            lines.append(f"Gain {gain.mean:+.3f}, interval {interval}, from {counted(gain.n, 'pair')} of rollouts.")
        lines.extend(f"Round {one.round}: {one}" for one in self.challenges)
        if self.spent:
            rollouts, model_calls = int(self.spent["rollouts"]), int(self.spent["model_calls"])
            calls = f"{counted(rollouts, 'rollout')}, {counted(model_calls, 'model call')}"
            cost = f", {self.spent['cost']:.4g} in money" if self.spent["cost"] else ""
            lines.append(f"Spent: {calls}{cost}.")
        lines.extend(f"{what[0].upper()}{what[1:]}: {count}." for what, count in self.counts.items() if count)
        if self.stopped is not None:
            lines.append(f"Ended early: {self.stopped}.")
        return lines

    def __str__(self) -> str:
        return "\n".join([*self.headlines(), *self._diff_lines()])

    def show(self, console: "Console") -> None:
        """Write it to a terminal, in colours."""
        from rich.text import Text

        for line in self.headlines():
            console.print(Text(line))
        for line in self._diff_lines():
            console.print(Text(line, style=_STYLES.get(line[:1], "")))

    def to_json(self) -> dict[str, Any]:
        """As it stands in the store and in the output file."""
        return {
            "best_version": self.best_version,
            "prompts": {name: prompt.model_dump() for name, prompt in self.best.items()},
            "seed": {name: prompt.model_dump() for name, prompt in self.seed.items()},
            "seed_score": self.seed_score,
            "best_score": self.best_score,
            "gain": None if self.gain is None else asdict(self.gain),
            "challenges": [asdict(one) for one in self.challenges],
            "spent": dict(self.spent),
            "counts": dict(self.counts),
            "stopped": self.stopped,
        }


def counted(count: int, what: str) -> str:
    """So many of something: `1 pair`, `2 pairs`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def tell(result: OptimisationResult, algorithm: str) -> None:
    """Show how a run ended: in colours on a terminal, else in the log. Standard output is left to the events."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        result.show(console)
    else:
        logger.info("%s is done.\n%s", algorithm, result)


def write_prompts(path: Path, result: OptimisationResult) -> None:
    """Write the best prompts to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        file.write(json.dumps(result.to_json(), ensure_ascii=False, indent=2).encode() + b"\n")
