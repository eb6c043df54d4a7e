"""The bookkeeping of a training: every notice counts, some rollouts are read, and the figures follow."""

import pytest

from agentlightning.trainer.progress import (
    CURVE_POINTS,
    KEPT_FAILURES,
    UNREAD_ROLLOUTS,
    Curve,
    Failure,
    Progress,
    Sample,
)
from agentlightning.types import Notice


def count(progress: Progress, rollout_id: str, *statuses: str) -> None:
    for status in statuses:
        progress.count(Notice("rollout", rollout_id=rollout_id, status=status))


def finished(number: int) -> Progress:
    progress = Progress(0.0)
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
    progress = Progress(0.0)

    count(progress, "ro-1", *statuses)

    assert progress.figures(1.0).rollouts == rollouts
    assert progress.figures(1.0).total == sum(rollouts.values())


def test_states_are_in_the_order_of_a_rollouts_life() -> None:
    progress = Progress(0.0)

    count(progress, "ro-1", "queuing", "failed")
    count(progress, "ro-2", "queuing", "running", "requeuing")
    count(progress, "ro-3", "queuing", "succeeded")

    assert list(progress.figures(1.0).rollouts) == ["requeuing", "succeeded", "failed"]


def test_attempts_that_are_tried_again_are_errors_too() -> None:
    progress = Progress(0.0)

    count(progress, "ro-1", "queuing", "running", "requeuing", "running", "failed")

    assert progress.figures(1.0).errors == 2
    assert list(progress.unread_failures) == ["ro-1", "ro-1"]


def test_a_recount_replaces_the_counts_and_later_notices_go_on_from_it() -> None:
    progress = finished(5)

    progress.recount({"ro-9": "running"}, {"succeeded": 40, "failed": 2})
    count(progress, "ro-9", "succeeded")

    assert progress.figures(1.0).rollouts == {"succeeded": 41, "failed": 2}


def test_when_too_many_finish_the_oldest_are_not_read_and_figures_are_estimates() -> None:
    assert not finished(UNREAD_ROLLOUTS).figures(1.0).is_estimate

    progress = finished(UNREAD_ROLLOUTS + 10)

    assert progress.unread[0] == ("ro-10", "succeeded")
    assert progress.figures(1.0).is_estimate


def test_rewards_have_a_mean_a_last_one_and_a_curve() -> None:
    progress = finished(3)

    for reward in (1.0, None, 0.5):
        progress.add_sample(Sample("ro", "succeeded", reward, 0))

    figures = progress.figures(1.0)
    assert (figures.reward_mean, figures.reward_last, figures.curve) == (0.75, 0.5, (1.0, 0.5))


def test_tokens_of_those_read_stand_for_all() -> None:
    progress = finished(10)

    progress.add_sample(Sample("ro-0", "succeeded", None, 100))
    progress.add_sample(Sample("ro-1", "succeeded", None, 300))

    figures = progress.figures(4.0)
    assert (figures.tokens, figures.tokens_per_second) == (2000, 500.0)


def test_only_the_last_few_failures_are_kept() -> None:
    progress = Progress(0.0)

    for number in range(KEPT_FAILURES + 2):
        progress.failures.append(Failure(f"ro-{number}", "at", "broken"))

    assert [failure.rollout_id for failure in progress.figures(1.0).failures] == ["ro-2", "ro-3", "ro-4"]


def test_eta_is_what_is_left_at_the_rate_so_far() -> None:
    progress = finished(4)
    for number in range(6):
        count(progress, f"left-{number}", "queuing")

    assert progress.figures(8.0).eta_seconds == pytest.approx(12.0)


def test_eta_follows_the_rate_of_late() -> None:
    progress = finished(10)
    for second in range(100):
        progress.figures(float(second))
    for number in range(20):
        count(progress, f"late-{number}", "queuing", "succeeded")
    count(progress, "left", "queuing")

    assert progress.figures(100.0).eta_seconds == pytest.approx(60 / 20)


def test_without_work_left_or_before_the_first_end_there_is_no_eta() -> None:
    waiting = Progress(0.0)
    count(waiting, "ro-1", "queuing")

    assert [progress.figures(5.0).eta_seconds for progress in (Progress(0.0), finished(3), waiting)] == [None] * 3
    assert waiting.figures(0.0).tokens_per_second == 0.0


def test_a_curve_covers_all_values_with_a_bounded_number_of_points() -> None:
    curve = Curve()
    assert curve.points == []

    for number in range(10_000):
        curve.add(float(number))

    assert CURVE_POINTS / 2 <= len(curve.points) <= CURVE_POINTS
    assert curve.points == sorted(curve.points)
    assert curve.points[0] < 500
    assert curve.points[-1] > 9500
