"""The score of finished rollouts: those without a reward are counted and left out of the mean."""

import pytest

from agentlightning.algorithm.grpo.collecting import FinishedRollout
from agentlightning.algorithm.grpo.scoring import score_of
from agentlightning.algorithm.intervals import estimate
from agentlightning.errors import TrainingError
from agentlightning.types import Rollout, RolloutStatus


def finished(reward: float | None, status: RolloutStatus = "succeeded", error: str | None = None) -> FinishedRollout:
    rollout = Rollout(rollout_id="ro-1", input=None, start_time=0.0, status=status)
    return FinishedRollout(rollout, "group-0", [], reward, error)


def test_failures_are_counted_by_their_reasons_and_left_out_of_the_mean() -> None:
    down = "ConnectionError: down"
    lost = [finished(1.0, "failed", down), finished(None, "failed", down), finished(None)]

    score = score_of([finished(0.5), *lost, finished(0.25)])

    assert score.reward == estimate([0.5, 0.25])
    assert (score.failed, dict(score.errors)) == (3, {down: 2, "succeeded, without a reward": 1})


def test_figures_are_those_of_a_validation() -> None:
    score = score_of([finished(0.5), finished(0.25), finished(None, "failed")])

    bounds = {"validation/low": score.reward.low, "validation/high": score.reward.high}
    assert score.metrics() == {"validation/reward": 0.375, "validation/failed": 1.0, **bounds}


@pytest.mark.parametrize(
    ("rollouts", "words"),
    [
        ([], "None of 0 rollouts gave a reward; most often: there were no tasks"),
        ([finished(None, "failed", "OSError: no disk")] * 2, "None of 2 rollouts gave a reward; most often: OSError"),
    ],
    ids=["none", "failures"],
)
def test_nothing_with_a_reward_is_an_error(rollouts: list[FinishedRollout], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        score_of(rollouts)
