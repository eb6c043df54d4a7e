"""Findings: everything that is wrong with a run.

The rules are ordered by what hides what: where rollouts fail, nothing can be said of their answers. The first finding
is the cause that a verdict names; those after it are named too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from agentlightning.verdict import learning_rules as learning
from agentlightning.verdict import rollout_rules as rollouts
from agentlightning.verdict.evidence import Evidence
from agentlightning.verdict.rollout_rules import Finding, Rule, more

__all__ = ["FINDINGS", "Finding", "find"]


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
