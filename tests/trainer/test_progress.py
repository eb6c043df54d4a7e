"""The bookkeeping of a training: every notice counts, some rollouts are read, and the figures follow."""

import pytest

from agentlightning.trainer.console import UNREAD_ROLLOUTS, RolloutProgress
from agentlightning.trainer.views import Sample
from agentlightning.types import Notice


def count(progress: RolloutProgress, rollout_id: str, *statuses: str) -> None:
    for status in statuses:
        progress.count(Notice("rollout", rollout_id=rollout_id, status=status))


def finished(number: int) -> RolloutProgress:
    progress = RolloutProgress(0.0)
    for n in range(number):
        count(progress, f"ro-{n}", "queuing", "running", "succeeded")
    return progress


@pytest.mark.parametrize(
    ("statuses", "rollouts"),
    [
        (["queuing", "preparing", "running", "succeeded"], {"succeeded": 1}),
        (["queuing", "preparing"], {"preparing": 1}),
        (["queuing", "succeeded", "succeeded"], {"succeeded": 1}),
        (["succeeded"], {}),
        (["queuing", "hibernating"], {"queuing": 1}),
    ],
    ids=["whole life", "newest only", "end once", "not ours", "unknown status"],
)
def test_a_rollout_counts_in_its_newest_state_only(statuses: list[str], rollouts: dict[str, int]) -> None:
    progress = RolloutProgress(0.0)

    count(progress, "ro-1", *statuses)

    assert progress.figures(1.0).rollouts == rollouts
    assert progress.figures(1.0).total == sum(rollouts.values())


def test_attempts_that_are_tried_again_are_errors_too() -> None:
    progress = RolloutProgress(0.0)

    count(progress, "ro-1", "queuing", "running", "requeuing", "running", "failed")

    assert progress.figures(1.0).errors == 2
    assert list(progress.unread_failures) == ["ro-1", "ro-1"]


def test_when_too_many_finish_the_oldest_are_not_read_and_figures_are_estimates() -> None:
    assert not finished(UNREAD_ROLLOUTS).figures(1.0).is_estimate

    progress = finished(UNREAD_ROLLOUTS + 10)

    assert progress.unread[0] == ("ro-10", "succeeded")
    assert progress.figures(1.0).is_estimate


def test_tokens_of_those_read_stand_for_all() -> None:
    progress = finished(10)

    progress.add_sample(Sample("ro-0", "succeeded", None, 100))
    progress.add_sample(Sample("ro-1", "succeeded", None, 300))

    figures = progress.figures(4.0)
    assert (figures.tokens, figures.tokens_per_second) == (2000, 500.0)


def test_eta_is_what_is_left_at_the_rate_so_far() -> None:
    progress = finished(4)
    for number in range(6):
        count(progress, f"left-{number}", "queuing")

    assert progress.figures(8.0).eta_seconds == pytest.approx(12.0)
