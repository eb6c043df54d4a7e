"""The score of finished rollouts: those without a reward are counted, in the mean too unless it is said otherwise."""

import math
from dataclasses import replace

import pytest

from agentlightning.algorithm.grpo.collecting import FinishedRollout
from agentlightning.algorithm.grpo.scoring import score_of
from agentlightning.algorithm.intervals import FailedReward, estimate
from agentlightning.errors import TrainingError
from agentlightning.types import Rollout, RolloutStatus


def finished(reward: float | None, status: RolloutStatus = "succeeded", error: str | None = None) -> FinishedRollout:
    rollout = Rollout(rollout_id="ro-1", input=None, start_time=0.0, status=status)
    return FinishedRollout(rollout, "group-0", [], reward, error)


def test_failures_are_counted_by_their_reasons_and_as_the_worst_reward() -> None:
    down = "ConnectionError: down"
    lost = [finished(1.0, "failed", down), finished(None, "failed", down), finished(None)]

    score = score_of([finished(0.5), *lost, finished(0.25)])

    assert score.reward == replace(estimate([0.5, 0.25, 0.0, 0.0, 0.0]), failed=3, failed_reward=0.0)
    assert (score.failed, dict(score.errors)) == (3, {down: 2, "succeeded, without a reward": 1})


@pytest.mark.parametrize(
    ("failed", "rewards", "mean", "words"),
    [
        ("worst", [1.0, 0.5], 0.5, "(n=3, 1 failed and count 0)"),
        ("worst", [-2.0, 1.0], -1.0, "(n=3, 1 failed and count -2)"),
        ("skip", [1.0, 0.5], 0.75, "(n=2, 1 failed and are left out)"),
        (-3, [1.0, 0.5], -0.5, "(n=3, 1 failed and count -3)"),
    ],
    ids=["worst is zero", "worst is negative", "skip", "number"],
)
def test_it_can_be_said_what_failures_count(
    failed: FailedReward, rewards: list[float], mean: float, words: str
) -> None:
    score = score_of([*map(finished, rewards), finished(None, "failed")], failed)

    assert score.reward.mean == mean
    assert str(score.reward).endswith(words)


def test_reward_that_is_no_finite_number_is_a_failure() -> None:
    score = score_of([finished(1.0), finished(math.nan)])

    assert (score.reward.mean, dict(score.errors)) == (0.5, {"succeeded, with the reward nan": 1})


def test_figures_are_those_of_a_validation() -> None:
    score = score_of([finished(0.5), finished(0.25), finished(None, "failed")])

    bounds = {"validation/low": score.reward.low, "validation/high": score.reward.high}
    assert score.metrics() == {"validation/reward": 0.25, "validation/failed": 1.0, **bounds}


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
