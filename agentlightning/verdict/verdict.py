"""The verdict on a run or a rollout, in one sentence, with its interval and its findings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final, Literal

from agentlightning.events import suggestions
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Run
from agentlightning.verdict.evidence import Evidence, RolloutEvidence, read_evidence, read_rollout
from agentlightning.verdict.findings import Finding, find

__all__ = ["Outcome", "Verdict", "verdict_of", "verdict_of_rollout", "verdict_of_run"]

Outcome = Literal["gained", "no gain", "lost", "unknown"]
LEAST_STEPS: Final = 6
"""Steps that the training reward needs at least to be compared with itself."""
DEVIATIONS: Final = 1.96
VALIDATION_TASKS: Final = "validation tasks"
_WITHOUT_CAUSE: Final = (
    "The rewards differ, but not enough to tell a gain from chance; train longer, validate on more tasks, or use "
    "larger groups."
)


@dataclass(frozen=True)
class Gain:
    """By how much a reward rose, and where the true rise may lie."""

    mean: float
    low: float
    high: float
    n: int
    unit: str
    """What n counts."""

    @property
    def outcome(self) -> Outcome:
        if self.low > 0:
            return "gained"
        return "lost" if self.high < 0 else "no gain"

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}] ({self.n} {self.unit})"


@dataclass(frozen=True)
class Verdict:
    """What a run gained, or why it did not."""

    outcome: Outcome
    sentence: str
    gain: Gain | None
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"- {finding}" for finding in self.findings)])

    def as_summary(self) -> dict[str, Any]:
        """For the summary of a run: JSON."""
        return {
            "outcome": self.outcome,
            "sentence": self.sentence,
            "gain": None if self.gain is None else vars(self.gain),
            "findings": [{**vars(finding), "figures": dict(finding.figures)} for finding in self.findings],
        }


async def verdict_of_run(store: LightningStore, run: Run) -> Verdict:
    """The verdict on a run, from what the store has of it."""
    return verdict_of(await read_evidence(store, run))


def verdict_of(evidence: Evidence) -> Verdict:
    """What a run gained and what is wrong with it; a run that gained has no cause, only things worth a word."""
    findings = find(evidence)
    gain = _gain(evidence)
    outcome: Outcome = "unknown" if gain is None else gain.outcome
    if gain is not None and outcome == "gained":
        harmless = ("few_steps", "one_task") if gain.unit == VALIDATION_TASKS else ("few_steps",)
        findings = [finding for finding in findings if finding.name not in harmless]
        hacked = next((one for one in findings if one.name == "reward_hacking"), None)
        said = f"Gained {gain}." if hacked is None else f"Gained {gain} in the trained reward only. {hacked.sentence}"
        return Verdict(outcome, said, gain, tuple(findings))
    if gain is not None and outcome == "lost":
        cause = f" {findings[0].sentence}" if findings else ""
        return Verdict(outcome, f"Lost {gain}.{cause}", gain, tuple(findings))
    if gain is None and not (findings and evidence.is_training):
        said = findings[0].sentence if findings else "There is too little to say what was gained."
        return Verdict("unknown", said, None, tuple(findings))
    measured = f" ({gain})" if gain is not None else ""
    cause = findings[0].sentence if findings else _WITHOUT_CAUSE
    return Verdict("no gain", f"Nothing was gained{measured}: {cause}", gain, tuple(findings))


def _gain(evidence: Evidence) -> Gain | None:
    """By the paired test on validation tasks if there was one, else by the two validations, else by the training."""
    summary = evidence.run.summary
    paired = summary.get("gain")
    if isinstance(paired, Mapping) and {"mean", "low", "high", "n"} <= paired.keys():
        return Gain(paired["mean"], paired["low"], paired["high"], int(paired["n"]), VALIDATION_TASKS)
    before, after = summary.get("validation_before"), summary.get("validation_after")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return _difference(before, after)
    return _training_gain(evidence.series("reward/mean"))


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Gain | None:
    if not all({"mean", "low", "high", "n"} <= side.keys() for side in (before, after)):
        return None
    mean = after["mean"] - before["mean"]
    down = math.hypot(after["mean"] - after["low"], before["high"] - before["mean"])
    up = math.hypot(after["high"] - after["mean"], before["mean"] - before["low"])
    return Gain(mean, mean - down, mean + up, int(after["n"]), "validation tasks, not paired")


def _training_gain(rewards: list[float]) -> Gain | None:
    """The last third of the steps against the first."""
    third = len(rewards) // 3
    if len(rewards) < LEAST_STEPS:
        return None
    first, last = rewards[:third], rewards[-third:]
    mean = fmean(last) - fmean(first)
    half = DEVIATIONS * math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / third)
    return Gain(mean, mean - half, mean + half, len(rewards), "training steps, first third against last")


async def verdict_of_rollout(store: LightningStore, rollout: AttemptedRollout | Rollout) -> list[str]:
    """What happened to one rollout, line by line, and what to improve in a team that ran it."""
    spans = await store.query_spans(rollout.rollout_id, "latest")
    return [*_lines(await read_rollout(store, rollout)), *map(str, suggestions(spans))]


def _lines(found: RolloutEvidence) -> list[str]:
    lines = [
        f"Rollout '{found.rollout_id}' is '{found.status}'" + (f" with {found.error}" if found.error else "") + "."
    ]
    if found.attempt_status in ("timeout", "unresponsive"):
        lines.append(
            "It ran out of time; raise the timeout of its configuration."
            if found.attempt_status == "timeout"
            else "Its worker was lost; look for a runner that was killed."
        )
    if found.reward is None and found.status == "succeeded":
        lines.append("It left no reward: return a number from the agent, or call agl.emit_reward.")
    elif found.reward is not None:
        lines.append(f"Its reward is {found.reward:g}.")
    if found.calls_failed:
        lines.append(f"{found.calls_failed} of its model calls failed: {found.call_error}")
    if found.calls == 0:
        lines.append("No model call was recorded, so there is nothing to train.")
    else:
        with_ids = f"{found.calls_with_ids} of its {found.calls} model calls have token ids"
        lines.append(f"{with_ids}; {found.calls_cut_off} were cut off.")
    return lines
