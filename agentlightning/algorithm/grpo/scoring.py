"""What finished rollouts on a data set have come to: their mean reward, and why some have none."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.algorithm.grpo.collecting import FinishedRollout
from agentlightning.algorithm.intervals import Estimate, estimate
from agentlightning.errors import TrainingError

__all__ = ["Score", "score_of"]


@dataclass(frozen=True)
class Score:
    """How well an agent did."""

    reward: Estimate
    """Of the rollouts that succeeded and have one."""
    failed: int
    """The others."""
    errors: Counter[str]
    """What became of them."""

    def metrics(self) -> dict[str, float]:
        """The figures of a validation; bounds may be infinite."""
        found = self.reward
        figures = {"reward": found.mean, "low": found.low, "high": found.high, "failed": float(self.failed)}
        return {f"validation/{name}": value for name, value in figures.items()}


def score_of(finished: Sequence[FinishedRollout]) -> Score:
    """The score of rollouts; TrainingError if none has a reward."""
    rewards: list[float] = []
    errors: Counter[str] = Counter()
    for one in finished:
        if one.has_succeeded and one.reward is not None:
            rewards.append(one.reward)
        else:
            errors[one.error or f"{one.rollout.status}, without a reward"] += 1
    if not rewards:
        most = errors.most_common(1)[0][0] if errors else "there were no tasks"
        raise TrainingError(f"None of {len(finished)} rollouts gave a reward; most often: {most}")
    return Score(estimate(rewards), errors.total(), errors)
