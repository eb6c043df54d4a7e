"""The bookkeeping of a training: every notice counts, some rollouts are read, and the figures follow."""

from typing import Any

import pytest

from agentlightning.semconv import AGL_EXCEPTION
from agentlightning.trainer.progress import (
    CURVE_POINTS,
    KEPT_FAILURES,
    UNREAD_ROLLOUTS,
    Curve,
    Failure,
    Finished,
    Progress,
    Sample,
    last_failed,
    noted_failure,
    recorded_failure,
    sample_of,
)
from agentlightning.types import Attempt, AttemptStatus, Notice, Span


def told(progress: Progress, rollout_id: str, *statuses: str) -> None:
    for status in statuses:
        progress.count(Notice("rollout", rollout_id=rollout_id, status=status))


def finished(count: int) -> Progress:
    progress = Progress(0.0)
    for number in range(count):
        told(progress, f"ro-{number}", "queuing", "running", "succeeded")
    return progress


def span(name: str = "step", **attributes: Any) -> Span:
    dotted = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span.from_attributes(name=name, attributes=dotted, rollout_id="ro-1", attempt_id="at-1", sequence_id=1)


def attempt(status: AttemptStatus, number: int = 1, **metadata: Any) -> Attempt:
    return Attempt(
        rollout_id="ro-1",
        attempt_id=f"at-{number}",
        sequence_id=number,
        start_time=0.0,
        status=status,
        metadata=metadata or None,
    )


# ---------------------------------------------------------------------- counting


def test_a_rollout_counts_in_its_newest_state_only() -> None:
    progress = Progress(0.0)

    told(progress, "ro-1", "queuing", "preparing", "running", "succeeded")
    told(progress, "ro-2", "queuing", "preparing")
    told(progress, "ro-3", "queuing")

    assert progress.figures(1.0).rollouts == {"queuing": 1, "preparing": 1, "succeeded": 1}


def test_states_are_in_the_order_of_a_rollouts_life() -> None:
    progress = Progress(0.0)

    told(progress, "ro-1", "queuing", "failed")
    told(progress, "ro-2", "queuing", "running", "requeuing")
    told(progress, "ro-3", "queuing", "succeeded")

    assert list(progress.figures(1.0).rollouts) == ["requeuing", "succeeded", "failed"]


def test_the_end_of_a_rollout_is_counted_once() -> None:
    progress = Progress(0.0)

    told(progress, "ro-1", "queuing", "succeeded", "succeeded")

    assert progress.figures(1.0).finished == 1


def test_a_rollout_nobody_heard_of_before_its_end_is_not_counted() -> None:
    progress = Progress(0.0)

    told(progress, "ro-1", "succeeded")

    assert progress.figures(1.0).total == 0
    assert progress.next_rollout() is None


def test_a_status_of_another_release_is_ignored() -> None:
    progress = Progress(0.0)

    told(progress, "ro-1", "queuing", "hibernating")

    assert progress.figures(1.0).rollouts == {"queuing": 1}


def test_attempts_that_are_tried_again_are_errors_too() -> None:
    progress = Progress(0.0)

    told(progress, "ro-1", "queuing", "running", "requeuing", "running", "failed")

    assert progress.figures(1.0).errors == 2
    assert [progress.next_failure() for _ in range(3)] == ["ro-1", "ro-1", None]


def test_a_recount_replaces_the_counts_and_later_notices_go_on_from_it() -> None:
    progress = finished(5)

    progress.recount({"ro-9": "running"}, {"succeeded": 40, "failed": 2})
    told(progress, "ro-9", "succeeded")

    assert progress.figures(1.0).rollouts == {"succeeded": 41, "failed": 2}


# ---------------------------------------------------------------------- reading


def test_finished_rollouts_are_named_once_with_how_they_ended() -> None:
    progress = Progress(0.0)
    told(progress, "ro-1", "queuing", "succeeded")
    told(progress, "ro-2", "queuing", "cancelled")

    named = [progress.next_rollout() for _ in range(3)]

    assert named == [Finished("ro-1", "succeeded"), Finished("ro-2", "cancelled"), None]


def test_when_too_many_finish_the_oldest_are_not_read_and_figures_are_estimates() -> None:
    progress = finished(UNREAD_ROLLOUTS + 10)

    assert progress.next_rollout() == Finished("ro-10", "succeeded")
    assert progress.figures(1.0).is_estimate


def test_figures_are_no_estimate_while_all_can_still_be_read() -> None:
    assert not finished(UNREAD_ROLLOUTS).figures(1.0).is_estimate


def test_rewards_have_a_mean_and_a_last_one() -> None:
    progress = finished(3)

    for reward in (1.0, None, 0.5):
        progress.add_sample(Sample("ro", "succeeded", reward, 0))

    figures = progress.figures(1.0)
    assert (figures.reward_mean, figures.reward_last, figures.rewards) == (0.75, 0.5, 2)
    assert figures.curve == (1.0, 0.5)


def test_tokens_of_those_read_stand_for_all() -> None:
    progress = finished(10)

    progress.add_sample(Sample("ro-0", "succeeded", None, 100))
    progress.add_sample(Sample("ro-1", "succeeded", None, 300))

    assert progress.figures(4.0).tokens == 2000
    assert progress.figures(4.0).tokens_per_second == pytest.approx(500.0)


def test_only_the_last_few_failures_are_kept() -> None:
    progress = Progress(0.0)

    for number in range(KEPT_FAILURES + 2):
        progress.add_failure(Failure(f"ro-{number}", None, "broken"))

    assert [failure.rollout_id for failure in progress.figures(1.0).failures] == ["ro-2", "ro-3", "ro-4"]


# ---------------------------------------------------------------------- rates


def test_eta_is_what_is_left_at_the_rate_so_far() -> None:
    progress = finished(4)
    for number in range(6):
        told(progress, f"left-{number}", "queuing")

    assert progress.figures(8.0).eta_seconds == pytest.approx(12.0)


def test_eta_follows_the_rate_of_late() -> None:
    progress = finished(10)
    for second in range(100):
        progress.mark(float(second))
    for number in range(20):
        told(progress, f"late-{number}", "queuing", "succeeded")
    told(progress, "left", "queuing")

    assert progress.figures(100.0).eta_seconds == pytest.approx(60 / 20)


@pytest.mark.parametrize("progress", [Progress(0.0), finished(3)], ids=["nothing enqueued", "all finished"])
def test_without_work_left_there_is_no_eta(progress: Progress) -> None:
    assert progress.figures(5.0).eta_seconds is None


def test_before_the_first_end_there_is_no_eta() -> None:
    progress = Progress(0.0)
    told(progress, "ro-1", "queuing")

    assert progress.figures(5.0).eta_seconds is None
    assert progress.figures(0.0).tokens_per_second == 0.0


# ---------------------------------------------------------------------- the curve


def test_a_curve_covers_all_values_with_a_bounded_number_of_points() -> None:
    curve = Curve()

    for number in range(10_000):
        curve.add(float(number))

    assert CURVE_POINTS / 2 <= len(curve.points) <= CURVE_POINTS
    assert curve.points == sorted(curve.points)
    assert curve.points[0] < 500
    assert curve.points[-1] > 9500


def test_the_last_point_of_a_curve_is_the_mean_of_what_it_has() -> None:
    curve = Curve(most_points=2)

    for value in (1.0, 3.0, 5.0):
        curve.add(value)

    assert curve.points == [2.0, 5.0]


def test_an_empty_curve_has_no_points() -> None:
    assert Curve().points == []


# ---------------------------------------------------------------------- spans and attempts


def test_a_sample_has_the_final_reward_and_all_tokens() -> None:
    spans = [
        span(gen_ai__usage__prompt_tokens=10, gen_ai__usage__completion_tokens=5),
        span("agentlightning.reward", reward=0.2),
        span(gen_ai__usage__prompt_tokens=20),
        span("agentlightning.reward", reward=0.7),
    ]

    assert sample_of(Finished("ro-1", "succeeded"), spans) == Sample("ro-1", "succeeded", 0.7, 35)


def test_tokens_that_are_no_numbers_are_left_out() -> None:
    sample = sample_of(Finished("ro-1", "succeeded"), [span(gen_ai__usage__prompt_tokens="many")])

    assert (sample.reward, sample.tokens) == (None, 0)


def test_the_last_failed_attempt_is_found_behind_one_that_runs() -> None:
    attempts = [attempt("failed", 1), attempt("timeout", 2), attempt("running", 3)]

    found = last_failed(attempts)

    assert found is not None
    assert found.attempt_id == "at-2"
    assert last_failed([attempt("succeeded")]) is None


def test_a_noted_error_is_its_type_and_first_line_without_control_characters() -> None:
    noted = attempt("failed", error={"type": "ValueError", "message": "\nno \x1b[31manswer\nat all"})

    failure = noted_failure(noted)

    assert failure == Failure("ro-1", "at-1", "ValueError: no  [31manswer")


def test_an_attempt_without_a_note_has_no_noted_failure() -> None:
    assert noted_failure(attempt("failed")) is None
    assert noted_failure(attempt("failed", error="text")) is None


def test_an_exception_span_tells_where_the_attempt_does_not() -> None:
    recorded = span(AGL_EXCEPTION, exception__type="KeyError", exception__message="'x'")

    assert recorded_failure(attempt("failed"), [recorded]).message == "KeyError: 'x'"


def test_a_status_is_told_where_nothing_else_is() -> None:
    assert recorded_failure(attempt("timeout"), []).message == "the attempt ended as 'timeout'"
