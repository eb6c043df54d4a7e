"""Findings: one rule for each thing that keeps a training from learning.

A rule looks at the evidence and returns a finding, with the figure that shows it and what to try, or None. They are
ordered by what hides what: where rollouts fail, nothing can be said of their answers. The first one found is the cause
that a verdict names; those after it are named too.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from agentlightning.algorithm.sentinel import DISTINCT, LENGTH, TRAINED, WATCHED, WATCHED_ERROR, alarms_of
from agentlightning.events.advice import weakest_agent
from agentlightning.verdict.evidence import Evidence, RolloutEvidence

MOST: Final = 0.5
"""Above this share something is the cause of a failed training; above `NOTABLE` it is worth a word."""
NOTABLE: Final = 0.1
NEARLY_ALL: Final = 0.9
CUT_OFF: Final = 0.3
"""Share of answers cut off at the token limit from which on training suffers."""
FLAT_ENTROPY: Final = 0.02
"""Nats a token: the model chooses as good as always the same."""
RUNAWAY_ENTROPY: Final = 1.0
"""Nats a token by which entropy rises when a model falls apart."""
RUNAWAY_KL: Final = 0.5
"""Nats a token between the model before and after one step."""
STILL_KL: Final = 1e-7
FEW_STEPS: Final = 5
NOISY: Final = 0.2
"""Share of equal answers with unequal rewards."""
LEAST_ROLLOUTS: Final = 4
"""Fewer say nothing."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, the figures that show it, and what to try."""

    name: str
    sentence: str
    advice: str
    figures: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}"


Rule = Callable[[Evidence], Finding | None]


def find(evidence: Evidence) -> list[Finding]:
    """Everything that the rules find, causes before consequences."""
    found = [rule(evidence) for rule in _RULES]
    return [one for one in found if one is not None]


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


def _most_frequent(texts: Iterable[str | None]) -> str:
    counts = Counter(text for text in texts if text)
    return counts.most_common(1)[0][0] if counts else "no reason was recorded"


# ---------------------------------------------------------------------- rollouts that do not run


def _nothing_ran(evidence: Evidence) -> Finding | None:
    if evidence.rollouts or evidence.points:
        return None
    waiting = f"{evidence.waiting} rollouts wait in the queue" if evidence.waiting else "no rollout was sent"
    return Finding(
        "nothing_ran",
        f"No rollout was finished: {waiting}.",
        "Start runners (n_runners of the Trainer, or `agl runner`), see that the data set is not empty, and let an "
        "algorithm of your own wait for what it enqueues (`store.wait_for_rollouts`).",
        {"waiting": evidence.waiting},
    )


def _failed(evidence: Evidence) -> Finding | None:
    failed = [one for one in evidence.rollouts if one.status == "failed"]
    share = _share(len(failed), len(evidence.rollouts))
    if share <= NOTABLE or len(evidence.rollouts) < LEAST_ROLLOUTS:
        return None
    said = f"{len(failed)} of {len(evidence.rollouts)} rollouts"
    figures = {"failed": len(failed), "rollouts": len(evidence.rollouts)}
    status = Counter(one.attempt_status for one in failed).most_common(1)[0][0]
    if status == "timeout":
        return Finding(
            "timeout",
            f"{said} ran out of time.",
            "Raise rollout_timeout, or find what the agent waits for (`agl why STORE ROLLOUT`).",
            figures,
        )
    if status == "unresponsive":
        return Finding(
            "lost_workers",
            f"{said} lost the worker that ran them.",
            "Look for runners that were killed (memory is the usual reason), and run fewer at once.",
            figures,
        )
    return Finding(
        "failed",
        f"{said} failed, most often with: {_most_frequent(one.error for one in failed)}",
        "Mend the agent first: `trainer.dev(agent, tasks)` shows the traceback; failed rollouts teach nothing.",
        figures,
    )


def _model_calls_failed(evidence: Evidence) -> Finding | None:
    failed = sum(one.calls_failed for one in evidence.rollouts)
    calls = failed + sum(one.calls for one in evidence.rollouts)
    if _share(failed, calls) <= NOTABLE:
        return None
    return Finding(
        "model_calls_failed",
        f"{failed} of {calls} model calls failed, most often with: "
        f"{_most_frequent(one.call_error for one in evidence.rollouts)}",
        "Look at the backend's own log; limits of rate or context and a wrong model name are the usual reasons.",
        {"failed": failed, "calls": calls},
    )


# ---------------------------------------------------------------------- nothing to learn from


def _succeeded(evidence: Evidence) -> list[RolloutEvidence]:
    return [one for one in evidence.training if one.status == "succeeded"]


def _no_reward(evidence: Evidence) -> Finding | None:
    done = _succeeded(evidence)
    without = [one for one in done if one.reward is None]
    if len(done) < LEAST_ROLLOUTS or _share(len(without), len(done)) <= NOTABLE:
        return None
    return Finding(
        "no_reward",
        f"{len(without)} of {len(done)} rollouts that succeeded left no reward in the store.",
        "Return a number from the agent, or call `agl.emit_reward(...)` before it returns.",
        {"without": len(without), "rollouts": len(done)},
    )


def _bad_reward(evidence: Evidence) -> Finding | None:
    done = [one for one in evidence.training if one.reward is not None]
    bad = [one for one in done if not one.has_reward]
    counted = sum(evidence.series("skipped/bad_reward"))
    if not (bad or counted):
        return None
    return Finding(
        "bad_reward",
        f"{max(len(bad), int(counted))} rewards are not finite numbers.",
        "Look for a division by zero or a logarithm of zero in the reward.",
        {"bad": max(len(bad), int(counted))},
    )


def _no_model_calls(evidence: Evidence) -> Finding | None:
    done = _succeeded(evidence)
    silent = [one for one in done if one.calls == 0 and one.calls_failed == 0]
    if not evidence.is_training or len(done) < LEAST_ROLLOUTS or _share(len(silent), len(done)) <= MOST:
        return None
    return Finding(
        "no_model_calls",
        f"In {len(silent)} of {len(done)} rollouts no model call was recorded.",
        "See that the agent calls the model through a supported SDK or the endpoint of its `llm` resource, in its own "
        "process, and that it neither caches answers nor swallows an error before the call.",
        {"without": len(silent), "rollouts": len(done)},
    )


def _ids_missing(evidence: Evidence) -> Finding | None:
    calls = sum(one.calls for one in evidence.training)
    without = calls - sum(one.calls_with_ids for one in evidence.training)
    if not evidence.is_training or _share(without, calls) <= NOTABLE:
        return None
    return Finding(
        "ids_missing",
        f"{without} of {calls} model calls have no token ids, so their tokens cannot be trained.",
        "Serve the model with a backend that returns them ('hosted_vllm/...' or 'agl/...'), call it with chat "
        "completions, and keep it out of redirect_exclude.",
        {"without": without, "calls": calls},
    )


def _cut_off(evidence: Evidence) -> Finding | None:
    calls = sum(one.calls_with_ids for one in evidence.training)
    cut = sum(one.calls_cut_off for one in evidence.training)
    if calls < LEAST_ROLLOUTS or _share(cut, calls) <= CUT_OFF:
        return None
    return Finding(
        "cut_off",
        f"{cut} of {calls} answers were cut off at the token limit; such answers are not learned from by default.",
        "Raise max_tokens in the agent, ask for shorter answers, or set SampleSettings(skip_truncated=False).",
        {"cut_off": cut, "answers": calls},
    )


def _skipped(name: str, metric: str, sentence: str, advice: str) -> Rule:
    """A rule for what the algorithm left out of most steps."""

    def rule(evidence: Evidence) -> Finding | None:
        left_out, rollouts = sum(evidence.series(metric)), sum(evidence.series("rollouts/all"))
        if not rollouts or left_out / rollouts <= MOST:
            return None
        return Finding(name, sentence.format(int(left_out), int(rollouts)), advice, {"skipped": left_out})

    return rule


# ---------------------------------------------------------------------- rewards that do not differ


def _no_variance(evidence: Evidence) -> Finding | None:
    """Rewards that are the same within nearly all groups, for one of six reasons."""
    groups = evidence.groups
    same = [group for group in groups if len({one.reward for one in group}) == 1]
    if not groups or _share(len(same), len(groups)) < NEARLY_ALL:
        return None
    counted, total = sum(evidence.series("groups/same")), sum(evidence.series("groups/all"))
    if total and counted / total < NEARLY_ALL:  # a sum of weighted rewards differs where its first part does not
        return None
    values = {group[0].reward for group in same if group[0].reward is not None}
    lows, highs = evidence.series("reward/min"), evidence.series("reward/max")
    lowest, highest = min([*values, *lows]), max([*values, *highs])
    equal = [group for group in groups if len({one.answer for one in group}) == 1 and group[0].answer is not None]
    figures = {"groups": len(groups), "same": len(same), "equal_answers": len(equal), "reward": fmean(values)}
    said = f"In {len(same)} of {len(groups)} groups all rewards are the same"
    if lowest < highest and values == {highest}:
        return None  # solved, after it was not
    if _share(len(equal), len(groups)) >= NEARLY_ALL and not (values == {highest} and highest >= 1):
        return _equal_answers(evidence, said, figures)
    if len(values) > 1:
        return Finding(
            "too_easy_or_too_hard",
            f"{said}: each task is either always solved or never ({fmean(values):.2f} in the mean).",
            "Give tasks of middling difficulty, a reward for parts of the solution, or larger groups.",
            figures,
        )
    value = next(iter(values))
    if value >= 1 or (value > 0 and value == highest > lowest):
        return Finding(
            "all_right",
            f"{said} and the best there is ({value:g}): there is nothing left to learn.",
            "Give harder tasks, or a reward that tells good answers from better ones.",
            figures,
        )
    if value <= 0:
        ever = "no answer was ever right" if highest <= value else "hardly an answer was right"
        return Finding(
            "all_wrong",
            f"{said} and the worst there is ({value:g}): {ever}.",
            "Give easier tasks or examples in the prompt, reward parts of the solution, or begin with SFT.",
            figures,
        )
    return Finding(
        "constant_reward",
        f"{said}: every rollout got {value:g}, whatever it answered.",
        "Look into the reward: it does not depend on the answer.",
        figures,
    )


def _equal_answers(evidence: Evidence, said: str, figures: Mapping[str, float]) -> Finding:
    entropies = evidence.series("learner/entropy")
    said += ", because all answers of a group are the same, token by token"
    if entropies and entropies[-1] <= FLAT_ENTROPY:
        return Finding(
            "collapsed",
            f"{said}: the model collapsed to one answer (entropy {entropies[-1]:.3f}).",
            "Lower the learning rate, set entropy_coefficient, or go back to an earlier checkpoint.",
            {**figures, "entropy": entropies[-1]},
        )
    return Finding(
        "same_answers",
        f"{said}.",
        "Do not fix the seed and do not cache answers in the agent or its client, and sample at a temperature above 0.",
        figures,
    )


def _noisy_reward(evidence: Evidence) -> Finding | None:
    """Equal answers to one task must get equal rewards, or there is nothing that can be learned."""
    pairs = unequal = 0
    for group in evidence.groups:
        by_answer: dict[object, list[float]] = {}
        for one in group:
            if one.answer is not None and one.reward is not None:
                by_answer.setdefault(one.answer, []).append(one.reward)
        for rewards in by_answer.values():
            pairs += len(rewards) - 1
            unequal += sum(reward != rewards[0] for reward in rewards[1:])
    if pairs < LEAST_ROLLOUTS or unequal / pairs <= NOISY:
        return None
    return Finding(
        "noisy_reward",
        f"Equal answers to the same task got different rewards in {unequal} of {pairs} cases.",
        "Look into the reward: it depends on chance, or on something the model does not see.",
        {"unequal": unequal, "pairs": pairs},
    )


def _one_task(evidence: Evidence) -> Finding | None:
    tasks = {one.task for one in evidence.training}
    groups = {(one.step, one.group) for one in evidence.training if one.group is not None}
    if len(tasks) != 1 or len(groups) < LEAST_ROLLOUTS:
        return None
    return Finding(
        "one_task",
        f"All {len(evidence.training)} rollouts that were looked at have the same task.",
        "Give a data set of many tasks, or the model learns this one by heart.",
        {"rollouts": len(evidence.training)},
    )


# ---------------------------------------------------------------------- learning that goes wrong


def _fell(rewards: Sequence[float]) -> bool:
    """Whether a reward lost most of what it had gained, or of what it was."""
    if len(rewards) < FEW_STEPS:
        return False
    last, peak = fmean(rewards[-3:]), max(rewards)
    return last < peak - 0.5 * max(abs(peak), abs(peak - min(rewards)))


def _learning_rate_too_high(evidence: Evidence) -> Finding | None:
    entropies, rewards = evidence.series("learner/entropy"), evidence.series("reward/mean")
    changes = [*evidence.series("learner/kl_to_old"), *evidence.series("learner/kl")]
    rate = (evidence.series("learner/learning_rate") or [0.0])[-1]
    advice = f"Lower the learning rate ({rate:g} now) by a factor of 3 to 10, or set kl_coefficient."
    if len(entropies) >= 2 and max(entropies) > entropies[0] + RUNAWAY_ENTROPY and _fell(rewards):
        return Finding(
            "learning_rate_too_high",
            f"The model fell apart: entropy rose from {entropies[0]:.2f} to {max(entropies):.2f} nats a token and the "
            f"reward fell to {fmean(rewards[-3:]):.2f} from {max(rewards):.2f}.",
            advice,
            {"entropy": max(entropies), "learning_rate": rate},
        )
    if changes and max(changes) > RUNAWAY_KL:
        return Finding(
            "learning_rate_too_high",
            f"The model changed by {max(changes):.2f} nats a token in one step; 0.001 to 0.1 is usual.",
            advice,
            {"kl": max(changes), "learning_rate": rate},
        )
    if len(entropies) >= 2 and _fell(rewards) and min(entropies[-3:]) <= FLAT_ENTROPY < entropies[0]:
        return Finding(
            "collapsed",
            f"The model collapsed: entropy fell from {entropies[0]:.2f} to {entropies[-1]:.3f} nats a token, and the "
            f"reward to {fmean(rewards[-3:]):.2f} from {max(rewards):.2f}.",
            advice,
            {"entropy": entropies[-1], "learning_rate": rate},
        )
    return None


def _alarmed(evidence: Evidence) -> Finding | None:
    """What a sentinel watches; a run without one has no such metrics."""
    names = (TRAINED, WATCHED, WATCHED_ERROR, LENGTH, DISTINCT)
    alarms = alarms_of({name: evidence.series(name) for name in names})
    if not alarms:
        return None
    return Finding(
        "reward_hacking" if alarms[0].name == "reward_hacking" else "ran_away",
        alarms[0].sentence,
        "Look at rollouts with the highest reward (`agl dashboard`), close the loophole, and go back to an earlier "
        "checkpoint; Sentinel(stop=True) ends a run in time.",
        {name: curve[-1] for name, curve in alarms[0].curves.items() if curve},
    )


def _learning_rate_too_low(evidence: Evidence) -> Finding | None:
    changes = evidence.series("learner/kl_to_old")
    rate = (evidence.series("learner/learning_rate") or [0.0])[-1]
    if len(changes) < FEW_STEPS or max(changes) > STILL_KL:
        return None
    return Finding(
        "learning_rate_too_low",
        f"In {len(changes)} steps the model did not change (at most {max(changes):.1g} nats a token in one).",
        f"Raise the learning rate ({rate:g} now) by a factor of 10.",
        {"kl": max(changes), "learning_rate": rate},
    )


def _few_steps(evidence: Evidence) -> Finding | None:
    learned = evidence.steps_learned
    if not 0 < learned < FEW_STEPS:
        return None
    return Finding(
        "few_steps",
        f"Only {learned} step{'s' if learned > 1 else ''} taught the model something.",
        "Train longer; tens of steps are usual.",
        {"steps": learned},
    )


def _weak_agent(evidence: Evidence) -> Finding | None:
    """Of several agents with rewards of their own, the one to optimise first."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for one in evidence.training:
        for agent, values in one.rewards_by_agent.items():
            rewards[agent] += values
    found = weakest_agent({agent: values for agent, values in rewards.items() if len(values) >= LEAST_ROLLOUTS})
    if found is None:
        return None
    return Finding("weak_agent", found.sentence, found.advice, {"reward": fmean(rewards[found.about])})


_RULES: Final[Sequence[Rule]] = (
    _nothing_ran,
    _failed,
    _model_calls_failed,
    _no_reward,
    _bad_reward,
    _no_model_calls,
    _ids_missing,
    _learning_rate_too_high,
    _cut_off,
    _skipped(
        "groups_too_small",
        "skipped/group_too_small",
        "{} of {} rollouts had no sibling with a reward to be compared with.",
        "Raise group_size, or mend what makes the siblings fail.",
    ),
    _skipped(
        "too_long",
        "skipped/too_long",
        "{} sequences of {} rollouts are longer than max_tokens and were left out.",
        "Raise max_tokens of the SampleSettings, or shorten the conversations.",
    ),
    _skipped(
        "too_stale",
        "skipped/too_stale",
        "{} sequences of {} rollouts came from weights too old to learn from.",
        "Raise max_staleness, or send fewer steps ahead.",
    ),
    _no_variance,
    _noisy_reward,
    _alarmed,
    _learning_rate_too_low,
    _one_task,
    _few_steps,
    _weak_agent,
)
FINDINGS: Final = (
    *("nothing_ran", "failed", "timeout", "lost_workers", "model_calls_failed", "no_reward", "bad_reward"),
    *("no_model_calls", "ids_missing", "cut_off", "groups_too_small", "too_long", "too_stale"),
    *("too_easy_or_too_hard", "all_right", "all_wrong", "constant_reward", "collapsed", "same_answers"),
    *(
        "noisy_reward",
        "reward_hacking",
        "ran_away",
        "learning_rate_too_high",
        "learning_rate_too_low",
        "one_task",
        "few_steps",
        "weak_agent",
    ),
)
"""The names of all findings."""
