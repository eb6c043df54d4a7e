"""Candidates: prompts under a version, where each came from, and what became of it."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict

from agentlightning.errors import ConfigurationError
from agentlightning.types import PromptTemplate, RolloutStatus, Run

__all__ = ["Candidate", "Fate", "Lineage", "RolloutResultForAPO", "VersionedPromptTemplate"]

Fate = Literal["seed", "proposed", "rejected", "dropped", "kept", "refused", "promoted"]


@dataclass
class Candidate:
    """A set of prompts of which one was changed."""

    version: str
    resource_name: str
    """Of the prompt that was changed."""
    template: str
    """Its new text."""
    parent: str | None = None
    round: int = 0
    critique: str | None = None
    """What was said of the parent, and led to this."""
    scores: dict[int, float] = field(default_factory=dict)
    """Mean rewards on the validation batches, by round; comparable within a round alone."""
    fate: Fate = "proposed"
    """`rejected` without a rollout, `dropped` from the beam, `kept` in it, `refused` by the paired comparison with the
    best prompt, or `promoted` to be the best."""
    reason: str | None = None


class Lineage:
    """All candidates of a run, in the order in which they came up."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._by_version = {candidate.version: candidate for candidate in candidates}

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._by_version.values())

    def __len__(self) -> int:
        return len(self._by_version)

    def __contains__(self, version: str) -> bool:
        return version in self._by_version

    def __getitem__(self, version: str) -> Candidate:
        if version not in self._by_version:
            raise ConfigurationError(f"There is no candidate '{version}'; there are {', '.join(self._by_version)}.")
        return self._by_version[version]

    def add(self, candidate: Candidate) -> None:
        self._by_version[candidate.version] = candidate

    def settle(self, version: str, fate: Fate, reason: str | None = None) -> None:
        """Note what became of a candidate; one that was promoted or refused stays so, whatever the beam does."""
        candidate = self._by_version.get(version)
        if candidate is None or candidate.fate == "seed":
            return
        if candidate.fate in ("promoted", "refused") and fate in ("kept", "dropped"):
            return
        candidate.fate, candidate.reason = fate, reason if reason is not None else candidate.reason

    def ancestry(self, version: str) -> list[Candidate]:
        """The candidates from the seed to this one."""
        line: list[Candidate] = []
        current: str | None = version
        while current is not None:
            candidate = self[current]
            line.append(candidate)
            current = candidate.parent
        return line[::-1]

    def to_json(self) -> list[dict[str, Any]]:
        """As it stands in the store, under `candidates` in the summary of the algorithm's run."""
        return [{**asdict(one), "scores": {str(n): score for n, score in one.scores.items()}} for one in self]

    @classmethod
    def of_run(cls, run: Run) -> "Lineage":
        """The lineage that a run left in the store."""
        if "candidates" not in run.summary:
            raise ConfigurationError(f"Run '{run.run_id}' has no candidates; take one with the name 'apo' or 'gepa'.")
        rows = [dict(row) for row in run.summary["candidates"]]
        return cls(
            Candidate(**{**row, "scores": {int(number): score for number, score in row["scores"].items()}})
            for row in rows
        )


# ---------------------------------------------------------------------- as APO has them


class RolloutResultForAPO(TypedDict):
    """What a rollout shows to the critic."""

    status: RolloutStatus
    final_reward: float | None
    spans: list[dict[str, Any]]
    messages: list[Any]


@dataclass
class VersionedPromptTemplate:
    """A candidate: a prompt, and the other prompts of its set where there are several."""

    version: str
    prompt_template: PromptTemplate
    score: float | None = None
    """Mean reward on the last batch it was tried on."""
    resource_name: str | None = None
    """Of the prompt; None stands for the only one."""
    companions: dict[str, PromptTemplate] = field(default_factory=dict)
    """The other prompts, by name."""
    parent: str | None = None
    critique: str | None = None

    def prompts(self, resource_name: str) -> dict[str, PromptTemplate]:
        """All prompts of the set by name; `resource_name` is that of the only one."""
        return {**self.companions, self.resource_name or resource_name: self.prompt_template}

    def turned_to(self, resource_name: str) -> "VersionedPromptTemplate":
        """The same set, with another of its prompts in front."""
        if self.resource_name is None or self.resource_name == resource_name:
            return self
        prompts = self.prompts(resource_name)
        front = prompts.pop(resource_name)
        return VersionedPromptTemplate(
            self.version, front, self.score, resource_name=resource_name, companions=prompts, parent=self.parent
        )
