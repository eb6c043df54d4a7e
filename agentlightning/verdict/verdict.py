"""The verdict on a run or a rollout, in one sentence, with its interval and its findings.

Findings are everything that is wrong with a run. The rules are ordered by what hides what: where rollouts fail, nothing
can be said of their answers. The first finding is the cause that a verdict names; those after it are named too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final, Literal

from agentlightning.algorithm.comparison import estimate, reward_of_failed, student_quantile
from agentlightning.events import suggestions
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Run
from agentlightning.utils.clipped_text import counted
from agentlightning.verdict import learning_rules as learning
from agentlightning.verdict import rollout_rules as rollouts
from agentlightning.verdict.evidence import Evidence, RolloutEvidence, read_evidence, read_rollout
from agentlightning.verdict.rollout_rules import QUOTING, Finding, Rule, more

__all__ = ["Outcome", "Verdict", "verdict_of", "verdict_of_rollout", "verdict_of_run", "FINDINGS", "Finding", "find"]


def find(evidence: Evidence) -> list[Finding]:
    """Everything that the rules find, causes before consequences; of several policies, each by itself."""
    found: list[Finding] = []
    policies = [replace(evidence, policy=name) for name in evidence.policies]
    for rule in _RULES:
        if evidence.kind == "groups" or rule in _OF_KIND[evidence.kind]:
            own = [(one.policy, finding) for one in policies if (finding := rule(one)) is not None]
            is_common = len(own) == len(policies) and len({finding.sentence for _, finding in own}) == 1
            for name, one in own[:1] if is_common else own:
                found.append(one if is_common else replace(one, sentence=f"Policy '{name}': {one.sentence}"))
    return found


_RULES: Final[Sequence[Rule]] = (
    rollouts.nothing_ran,
    rollouts.failed,
    rollouts.model_calls_failed,
    rollouts.no_reward,
    rollouts.bad_reward,
    rollouts.no_model_calls,
    rollouts.ids_missing,
    learning.same_rewards,
    learning.learning_rate_too_high,
    learning.collapsed_late,
    rollouts.cut_off,
    rollouts.skipped(
        "groups_too_small",
        "skipped/group_too_small",
        "{} of {} rollouts had no sibling with a reward to be compared with.",
        lambda evidence: (
            f"To compare more rollouts, {more(evidence, 'group_size')}; min_group_size of the SampleSettings "
            f"is {evidence.setting('sampling.min_group_size') or 2}. Or mend what makes the siblings fail."
        ),
    ),
    rollouts.skipped(
        "too_long",
        "skipped/too_long",
        "{} sequences of {} rollouts are longer than max_tokens and were left out.",
        lambda evidence: (
            f"Shorten the conversations, or {more(evidence, 'sampling.max_tokens')} of the SampleSettings."
        ),
    ),
    rollouts.skipped(
        "too_stale",
        "skipped/too_stale",
        "{} sequences of {} rollouts came from weights too old to learn from.",
        lambda evidence: (
            f"Send fewer steps ahead (max_staleness of GRPO is {evidence.setting('max_staleness') or 0}), or "
            f"{more(evidence, 'sampling.max_staleness')} of the SampleSettings."
        ),
    ),
    learning.no_variance,
    learning.noisy_reward,
    learning.alarmed,
    learning.learning_rate_too_low,
    learning.one_task,
    learning.few_steps,
    learning.weak_agent,
)
_OF_ROLLOUTS: Final = (
    rollouts.nothing_ran,
    rollouts.failed,
    rollouts.model_calls_failed,
    rollouts.no_reward,
    rollouts.bad_reward,
    learning.same_rewards,
    learning.weak_agent,
)
_OF_TOKENS: Final = (
    rollouts.no_model_calls,
    rollouts.ids_missing,
    rollouts.cut_off,
    learning.learning_rate_too_high,
    learning.learning_rate_too_low,
)
_OF_KIND: Final = {"prompts": _OF_ROLLOUTS, "trial": _OF_ROLLOUTS, "examples": (*_OF_ROLLOUTS, *_OF_TOKENS)}
"""The rules for runs that compare no groups."""
FINDINGS: Final = (
    *("nothing_ran", "failed", "timeout", "lost_workers", "model_calls_failed", "no_reward", "bad_reward"),
    *("no_model_calls", "ids_missing", "cut_off", "groups_too_small", "too_long", "too_stale"),
    *("too_easy_or_too_hard", "all_right", "all_wrong", "constant_reward", "collapsed", "same_answers"),
    *("noisy_reward", "reward_hacking", "ran_away", "learning_rate_too_high", "learning_rate_too_low"),
    *("one_task", "few_steps", "weak_agent"),
)
"""The names of all findings."""


Outcome = Literal["gained", "no gain", "lost", "unknown"]
LEAST_STEPS: Final = 6
"""Steps that the training reward needs at least to be compared with itself."""
SURE: Final = 0.99
"""Of the quantile that a bound of training steps lies at."""
VALIDATION_TASKS: Final = "validation tasks"


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
    """What a run gained and what is wrong with it; the error of a run that failed comes first."""
    of_kind = {"groups": _of_groups, "examples": _of_examples, "prompts": _of_prompts, "trial": _of_trial}
    verdict = of_kind[evidence.kind](evidence, find(evidence))
    if evidence.error is None:
        is_running = evidence.run.status == "running"
        return replace(verdict, sentence=f"Still running. {verdict.sentence}") if is_running else verdict
    findings = tuple(one for one in verdict.findings if one.name not in ("nothing_ran", "few_steps"))
    said = f"The run failed: {evidence.error}{'' if evidence.error.endswith('.') else '.'}"
    cause = findings[0].sentence if findings else ""
    if verdict.gain is not None:
        said += f" Until then: {verdict.sentence}"
    elif (cause.partition(QUOTING)[2].rstrip(".") or cause) not in evidence.error:
        said += f" {cause}"
    return replace(verdict, sentence=said, findings=findings)


def _of_groups(evidence: Evidence, findings: list[Finding]) -> Verdict:
    """A run that gained has no cause, only things worth a word; one that learned may have gained and not shown it."""
    gain, steps = _gain(evidence), len(evidence.series("reward/mean"))
    outcome: Outcome = "unknown" if gain is None else gain.outcome
    is_validated = gain is not None and gain.unit.startswith(VALIDATION_TASKS)
    more, measured = _besides(evidence, gain), f" ({gain})" if gain is not None else ""
    cause = f" {findings[0].sentence}" if findings else ""
    learned = evidence.steps_learned if evidence.is_training else 0 if findings else steps
    if evidence.policies == [""] and any(one.name == "learning_rate_too_low" for one in findings):
        outcome, learned = "no gain", 0  # what a model gains or loses that did not change is chance
    if outcome == "gained":
        harmless = ("few_steps", "one_task") if is_validated else ("few_steps",)
        findings = [finding for finding in findings if finding.name not in harmless]
        doubts = {one.name: one.sentence for one in findings if one.name in ("failed", "reward_hacking", "collapsed")}
        limit = " in the trained reward only" if "reward_hacking" in doubts else ""
        said = " ".join([f"Gained {gain}{limit}.{more}", *doubts.values()])
    elif outcome == "lost":
        said = f"Lost {gain}.{more}{cause}"
    elif 0 < learned <= steps < LEAST_STEPS:
        is_new = findings and findings[0].name != "few_steps"
        said = f"Too short to say what was gained{measured}: {counted(learned, 'step')} of learning.{more}"
        outcome, said = "unknown", f"{said}{cause if is_new else ''}"
    elif findings and evidence.is_training and not learned:
        outcome, said = "no gain", f"Nothing was gained{measured}:{cause}{more}"
    elif gain is not None:
        advice = f"Validate on more than {gain.n} tasks" if is_validated else "Give tasks to validate on"
        if not is_validated and evidence.run.status != "succeeded" and evidence.run.config.get("n_val"):
            advice = "Let it run to its end, where it is validated"
        advice = f"{advice}, or train longer."
        after = (evidence.run.summary.get("validation_after") or {}).get("mean", -math.inf)
        if gain.mean == 0 and after >= max(evidence.series("reward/max"), default=math.inf):
            advice = f"Validation had the highest reward that was seen ({after:g}) before and after; take harder tasks."
        said = f"No gain can be told from chance{measured}.{more}{cause or f' {advice}'}"
    else:
        reward = _of_trial(evidence, []).sentence
        said = cause.strip() or f"{reward} No step has a reward/mean, so what was gained cannot be told."
    return Verdict(outcome, said, gain, tuple(findings))


def _gain(evidence: Evidence) -> Gain | None:
    """By the paired test on validation tasks if there was one, else by the two validations, else by the training."""
    summary = evidence.run.summary
    if paired := _paired(evidence):
        shown = next((gain for gain in paired.values() if gain.outcome != "no gain"), None)
        return shown or next(iter(paired.values()))
    before, after = summary.get("validation_before"), summary.get("validation_after")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return _difference(before, after, f"{VALIDATION_TASKS}, not paired")
    return _training_gain(evidence)


def _paired(evidence: Evidence) -> dict[str, Gain]:
    """The gains by the paired test: as validation samples, and as training does where that was measured too."""
    found = {name: evidence.run.summary.get(name) for name in ("gain", "gain_sampled")}
    how = ", answered greedily" if found["gain_sampled"] and evidence.setting("validation_temperature") == 0 else ""
    units = {"gain": f"{VALIDATION_TASKS}{how}", "gain_sampled": f"{VALIDATION_TASKS}, sampled as in training"}
    return {
        name: _gain_of(gain, units[name])
        for name, gain in found.items()
        if isinstance(gain, Mapping) and {"mean", "low", "high", "n"} <= gain.keys()
    }


def _gain_of(found: Mapping[str, Any], unit: str) -> Gain:
    return Gain(found["mean"], found["low"], found["high"], int(found["n"]), unit)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], unit: str) -> Gain | None:
    if not all({"mean", "low", "high", "n"} <= side.keys() for side in (before, after)):
        return None
    mean = after["mean"] - before["mean"]
    down = math.hypot(after["mean"] - after["low"], before["high"] - before["mean"])
    up = math.hypot(after["high"] - after["mean"], before["mean"] - before["low"])
    return Gain(mean, mean - down, mean + up, int(after["n"]), unit)


def _ends_of(rewards: list[float]) -> tuple[list[float], list[float]]:
    """The first steps, in which a fast learner has not learned yet, and the last ones."""
    third = len(rewards) // 3
    return rewards[: max(min(third, 3), len(rewards) // 10)], rewards[-third:]


def _training_gain(evidence: Evidence) -> Gain | None:
    """The last steps against the baseline, or against the first ones.

    Noise is what a step differs by from the mean of its neighbours, so that a curve that rises has none. Before the
    first step nothing was learned: where its reward is not that of the baseline, their tasks cannot be compared.
    """
    rewards = evidence.series("reward/mean")
    if len(rewards) < LEAST_STEPS:
        return None
    first, last = _ends_of(rewards)
    bends = [before - 2 * one + after for before, one, after in zip(rewards, rewards[1:], rewards[2:], strict=False)]
    noise = math.sqrt(fmean(bend**2 for bend in bends) / 6)
    wide, unit = student_quantile(SURE, len(bends) // 2) * noise, f"training steps, the last {len(last)} against"
    start, end = (
        {"mean": fmean(side), "low": fmean(side) - half, "high": fmean(side) + half, "n": len(rewards)}
        for side, half in ((side, wide / math.sqrt(len(side))) for side in (first, last))
    )
    is_alike = evidence.setting("validation_temperature") == evidence.setting("temperature")
    before = evidence.run.summary.get("validation_before" if is_alike else "validation_before_sampled") or {}
    gain = _difference(before, end, f"{unit} the baseline of {before.get('n')} validation tasks")
    if gain is not None and before["low"] - 2 * noise <= rewards[0] <= before["high"] + 2 * noise:
        return gain
    return _difference(start, end, f"{unit} the first {len(first)}")


def _besides(evidence: Evidence, gain: Gain | None) -> str:
    """The other of two measurements, the baseline of a run that was not validated after it, and what rewards are."""
    summary, rewards = evidence.run.summary, evidence.series("reward/mean")
    said = "".join(f" Besides: {one}." for one in _paired(evidence).values() if one != gain)
    sampled, is_greedy = summary.get("validation_before_sampled"), evidence.setting("validation_temperature") == 0
    before = sampled or summary.get("validation_before")
    if isinstance(before, Mapping) and len(rewards) >= LEAST_STEPS and "validation_after" not in summary:
        how = ", sampled as in training" if sampled else ", validated greedily" if is_greedy else ""
        said += f" Reward of the last steps {fmean(_ends_of(rewards)[1]):.3f}, baseline {before['mean']:.3f} on "
        said += f"{before['n']} tasks{how}; not validated at the end."
    return f"{said} A reward is the {kind}." if (kind := summary.get("reward_kind")) else said


def _of_examples(evidence: Evidence, findings: list[Finding]) -> Verdict:
    """Fine-tuning gains by the validation, if there was one; else its losses say what they can."""
    held_out, losses = evidence.series("sft/held_out_loss"), evidence.series("sft/loss")
    if (gain := _gain(evidence)) is not None or len(held_out or losses) < 2:
        return _of_groups(evidence, findings)
    said = f"The loss on the rollouts went from {losses[0]:.3f} to {losses[-1]:.3f} nats a token, none was held out"
    outcome: Outcome = "unknown"
    if held_out and min(held_out[1:]) < held_out[0]:
        said = f"The loss on held-out rollouts fell from {held_out[0]:.3f} to {min(held_out):.3f} nats a token"
    elif held_out:
        said = f"Nothing was gained: the loss on held-out rollouts did not fall below {held_out[0]:.3f} nats a token"
        outcome = "no gain"
    more = f" {findings[0].sentence}" if findings else ""
    return Verdict(outcome, f"{said}; rewards were not validated.{more}", gain, tuple(findings))


def _of_prompts(evidence: Evidence, findings: list[Finding]) -> Verdict:
    """The paired comparison with the seed, or why there was none."""
    found, more = evidence.optimisation, f" {findings[0].sentence}" if findings else ""
    if found.get("stopped"):
        more = f" Ended early: {found['stopped']}.{more}"
    challenges = sorted(found.get("challenges") or (), key=lambda one: float(one["gain"]["mean"]))
    measured = found.get("gain") or (challenges[-1]["gain"] if challenges else None)
    gain = None if measured is None else _gain_of(measured, VALIDATION_TASKS)
    outcome: Outcome = "no gain"
    if found.get("seed") != found.get("prompts"):
        best = f"the best prompt is {found['best_version']}"
        outcome = "unknown" if gain is None else gain.outcome
        said = (
            f"Gained {gain}: {best}." if outcome == "gained" else f"By its mean alone {best}: {gain or 'not compared'}."
        )
    elif gain is not None:
        best = challenges[-1]["candidate"]
        said = f"The seed is kept, for no candidate was shown to be better: {best}, the best candidate, has {gain}."
        if needed := challenges[-1].get("tasks_needed"):
            said += f" About {needed:,} validation tasks would decide it."
    else:
        candidates = [one for one in found.get("candidates", ()) if one["fate"] != "seed"]
        rejected = [one["reason"] for one in candidates if one["fate"] == "rejected"]
        is_over = "best_version" in found and evidence.run.status != "stopped"
        said = "The seed is still the best prompt" if is_over else "It ended before it could say what was gained"
        said += f": of {counted(len(candidates), 'candidate')} none came to be compared with the seed."
        said += f" {len(rejected)} were rejected, the first because {rejected[0]}." if rejected else ""
        outcome = "no gain" if is_over else "unknown"
    return Verdict(outcome, f"{said}{more}", gain, tuple(findings))


def _of_trial(evidence: Evidence, findings: list[Finding]) -> Verdict:
    """How the agent did; nothing was to be learned."""
    rewards = [one.reward for one in evidence.rollouts if one.reward is not None and one.has_reward]
    failed = len(evidence.rollouts) - len(rewards)
    counted = reward_of_failed(evidence.setting("failed") or "worst", rewards) if failed else None
    more = f" {findings[0].sentence}" if findings else ""
    if not rewards:
        more = more.strip() or f"No rollout {'left a reward' if evidence.rollouts else 'was finished'}."
        return Verdict("unknown", more, None, tuple(findings))
    found = replace(
        estimate(rewards if counted is None else [*rewards, *[counted] * failed]), failed=failed, failed_reward=counted
    )
    return Verdict("unknown", f"The reward is {found}{evidence.sample_words}.{more}", None, tuple(findings))


async def verdict_of_rollout(store: LightningStore, rollout: AttemptedRollout | Rollout) -> list[str]:
    """What happened to one rollout, line by line, and what to improve in a team that ran it."""
    spans = await store.query_spans(rollout.rollout_id, "latest")
    return [*_lines(await read_rollout(store, rollout)), *map(str, suggestions(spans))]


def _lines(found: RolloutEvidence) -> list[str]:
    reason = f" with {found.error}" if found.error else ""
    lines = [f"Rollout '{found.rollout_id}' is '{found.status}'{reason}."]
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
