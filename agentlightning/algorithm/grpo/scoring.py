"""What finished rollouts on a data set have come to: their mean reward, and why some failed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentlightning.algorithm.grpo.collecting import FinishedRollout
from agentlightning.algorithm.intervals import Estimate, FailedReward, estimate, reward_of_failed
from agentlightning.errors import TrainingError

__all__ = ["Score", "groups_that_differ", "score_of"]


@dataclass(frozen=True)
class Score:
    """How well an agent did."""

    reward: Estimate
    errors: Counter[str]
    """Why rollouts failed: they did not succeed, or have no reward that is a finite number."""

    @property
    def failed(self) -> int:
        return self.reward.failed

    def metrics(self) -> dict[str, float]:
        """The figures of a validation; bounds may be infinite."""
        found = self.reward
        figures = {"reward": found.mean, "low": found.low, "high": found.high, "failed": float(self.failed)}
        return {f"validation/{name}": value for name, value in figures.items()}


def score_of(finished: Sequence[FinishedRollout], failed: FailedReward = "worst") -> Score:
    """The score of rollouts; TrainingError if none has a reward.

    Args:
        failed: What those that failed count.
    """
    rewards: list[float] = []
    errors: Counter[str] = Counter()
    for one in finished:
        if one.own_reward is not None:
            rewards.append(one.own_reward)
        else:
            errors[one.failure] += 1
    if not rewards:
        most = errors.most_common(1)[0][0] if errors else "there were no tasks"
        raise TrainingError(f"None of {len(finished)} rollouts gave a reward; most often: {most}")
    counted = reward_of_failed(failed, rewards) if errors else None
    values = rewards if counted is None else [*rewards, *[counted] * errors.total()]
    return Score(replace(estimate(values), failed=errors.total(), failed_reward=counted), errors)


def groups_that_differ(finished: Sequence[FinishedRollout], failed: FailedReward) -> int:
    """How many groups have rewards that are not all the same.

    Args:
        failed: What rollouts that failed count.
    """
    counted = reward_of_failed(failed, [one.own_reward for one in finished if one.own_reward is not None])
    rewards: dict[str, set[float | None]] = {}
    for one in finished:
        rewards.setdefault(one.group, set()).add(counted if one.own_reward is None else one.own_reward)
    return sum(1 for found in rewards.values() if len(found - {None}) > 1)
