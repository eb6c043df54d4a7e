"""What a batch was made of, what was left out of it and why, in figures and in a sentence."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from agentlightning.adapter.trajectory import SampledCall
from agentlightning.algorithm.grpo.skipped import OF_SEQUENCES, Skipped

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.samples import Sample


@dataclass(frozen=True)
class SameGroup:
    """A group whose rewards are all the same."""

    reward: float
    kind: str
    """"all_right" if it is the highest reward that was seen, "all_wrong" if it is the lowest, and else "same"."""
    has_one_answer: bool
    """Whether the model chose the same tokens in all rollouts."""


@dataclass
class BatchReport:
    """What a batch was made of, and what was left out of it."""

    rollouts: int = 0
    groups: int = 0
    rollouts_used: int = 0
    samples: "list[Sample]" = field(default_factory=list)
    current_version: int | None = None
    """Of the weights that will learn."""
    sequences: int = 0
    """All that were sampled in rollouts with a reward: what the means of the loss divide by."""
    without_finish_reason: int = 0
    """Samples with an answer of which it was not recorded why it ended; where that is guessed, they are counted too."""
    truncated_calls: int = 0
    """Answers that were cut off, in sequences that were used or skipped."""
    rewards: list[float] = field(default_factory=list)
    call_rewards: list[float] = field(default_factory=list)
    """The rewards that follow the policy's own calls, summed for each rollout."""
    skipped: Counter[Skipped] = field(default_factory=Counter)
    """Rollouts by reason; for TRUNCATED and what follows it, sequences."""
    left_out: dict[str, Skipped] = field(default_factory=dict)
    """The last reason, by the rollout of which something was skipped."""
    calls_left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    """The reasons of single calls, by rollout and span."""
    tokens_by_version: Counter[int] = field(default_factory=Counter)
    """Chosen tokens of the samples, by the version of the weights that chose them, where it is known."""
    errors: Counter[str] = field(default_factory=Counter)
    """What failed rollouts said."""
    same: list[SameGroup] = field(default_factory=list)
    """Groups without variance."""
    penalties: list[float] = field(default_factory=list)
    """For too long answers, of each rollout; empty where there are none."""
    figures: dict[str, float] = field(default_factory=dict)
    """Further metrics of the step."""

    @property
    def groups_used(self) -> int:
        """Groups of which at least one sample is in the batch."""
        return len({sample.group for sample in self.samples})

    def skip(self, rollout_id: str, reason: Skipped, calls: Iterable[SampledCall] = ()) -> None:
        """Count a rollout, or one of its sequences with these calls, as not learned from."""
        self.skipped[reason] += 1
        self.left_out[rollout_id] = reason
        self.calls_left_out.setdefault(rollout_id, {}).update({call.span_id: reason.value for call in calls})

    def metrics(self) -> dict[str, float]:
        """Numbers for the record of a step; every reason is there, also where its count is zero."""
        found: dict[str, float] = {
            **self.figures,
            "rollouts/all": self.rollouts,
            "rollouts/used": self.rollouts_used,
            "groups/all": self.groups,
            "groups/used": self.groups_used,
            "groups/same": len(self.same),
            "groups/all_right": sum(one.kind == "all_right" for one in self.same),
            "groups/all_wrong": sum(one.kind == "all_wrong" for one in self.same),
            "groups/one_answer": sum(one.has_one_answer for one in self.same),
            "samples/used": len(self.samples),
            "samples/all": self.sequences,
            "samples/tokens": sum(sum(sample.loss_mask) for sample in self.samples),
            "samples/without_logprobs": sum(not sample.has_logprobs for sample in self.samples),
            "samples/without_version": sum(sample.version is None for sample in self.samples),
            "samples/without_finish_reason": self.without_finish_reason,
            "samples/truncated_calls": self.truncated_calls,
        }
        if self.rewards:
            found |= {"reward/mean": fmean(self.rewards), "reward/max": max(self.rewards)}
            found["reward/min"] = min(self.rewards)
        if self.call_rewards:
            found["reward/of_calls"] = fmean(self.call_rewards)
        if self.penalties:
            found["reward/overlong_penalty"] = fmean(self.penalties)
        versions = [sample.version for sample in self.samples if sample.version is not None]
        if versions and self.current_version is not None:
            found["staleness/mean"] = self.current_version - fmean(versions)
            found["staleness/max"] = self.current_version - min(versions)
            for version, tokens in self.tokens_by_version.items():
                found[f"staleness/tokens_{self.current_version - version}"] = tokens
        return found | {f"skipped/{reason.value}": float(self.skipped[reason]) for reason in Skipped}

    def words(self) -> str:
        """One sentence: what was used, and why the rest was not."""
        used = (
            f"{self.rollouts_used} of {self.rollouts} rollouts in {self.groups_used} of {self.groups} groups were used"
        )
        reasons = [
            f"{count} {'sequences' if reason in OF_SEQUENCES else 'rollouts'} {reason.value}"
            for reason, count in self.skipped.most_common()
            if count
        ]
        left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
        error = f" (most often: {self.errors.most_common(1)[0][0]})" if self.errors else ""
        return f"{used}{left_out}{error}.{self._why_same()}"

    def _why_same(self) -> str:
        """What the groups without variance have in common: all right, all wrong, or one answer."""
        kinds = Counter((one.kind.replace("_", " "), one.reward) for one in self.same)
        parts = [f"{count} {kind} (reward {reward:g})" for (kind, reward), count in kinds.most_common()]
        if not parts:
            return ""
        one_answer = sum(one.has_one_answer for one in self.same)
        collapsed = f"; {one_answer} collapsed to one answer" if one_answer else ""
        return f" Groups without variance: {', '.join(parts)}{collapsed}."
