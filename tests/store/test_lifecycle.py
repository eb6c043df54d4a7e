"""The rules of a rollout's life, as tables; time is an argument, so nothing waits."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.store.lifecycle import (
    ATTEMPT_STATUSES,
    DUE_NOW,
    ROLLOUT_STATUSES,
    attempt_end_time,
    attempt_status_after_span,
    due_time,
    is_finished,
    is_lost,
    is_queuing,
    is_running,
    is_silent,
    loss_of,
    overdue_status,
    rollout_status_after_span,
    rollout_status_from_attempt,
    rollout_status_from_attempts,
    run_as_seen,
)
from agentlightning.types import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus, Run, Worker

START = 1000.0
BROKEN: list[AttemptStatus] = ["failed", "timeout", "unresponsive"]


def attempt(status: AttemptStatus = "running", heartbeat: float | None = None, sequence_id: int = 1) -> Attempt:
    return Attempt(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=sequence_id,
        start_time=START,
        status=status,
        last_heartbeat_time=heartbeat,
    )


def rollout(status: RolloutStatus = "running", **config: Any) -> Rollout:
    return Rollout(rollout_id="ro-1", input=None, start_time=START, status=status, config=RolloutConfig(**config))


# ---------------------------------------------------------------------- kinds of status


def test_every_status_is_listed_in_the_order_of_its_type() -> None:
    assert get_args(RolloutStatus) == ROLLOUT_STATUSES
    assert get_args(AttemptStatus) == ATTEMPT_STATUSES


@pytest.mark.parametrize(
    ("status", "kinds"),
    [
        ("queuing", (True, False, False)),
        ("requeuing", (True, False, False)),
        ("preparing", (False, True, False)),
        ("running", (False, True, False)),
        ("failed", (False, False, True)),
        ("succeeded", (False, False, True)),
        ("cancelled", (False, False, True)),
    ],
)
def test_rollout_is_queuing_or_running_or_finished(status: RolloutStatus, kinds: tuple[bool, bool, bool]) -> None:
    subject = rollout(status)

    assert (is_queuing(subject), is_running(subject), is_finished(subject)) == kinds


# ---------------------------------------------------------------------- from the attempt to the rollout


@pytest.mark.parametrize("status", ["preparing", "running", "succeeded"])
def test_attempt_that_goes_well_gives_the_rollout_its_status(status: AttemptStatus) -> None:
    config = RolloutConfig(max_attempts=9, retry_condition=list(ATTEMPT_STATUSES))

    assert rollout_status_from_attempt(attempt(status), config) == status


@pytest.mark.parametrize("status", BROKEN)
def test_broken_attempt_fails_the_rollout_unless_asked_otherwise(status: AttemptStatus) -> None:
    assert rollout_status_from_attempt(attempt(status), RolloutConfig(max_attempts=9)) == "failed"


@pytest.mark.parametrize("status", BROKEN)
@pytest.mark.parametrize(
    ("sequence_id", "max_attempts", "expected"),
    [(1, 1, "failed"), (1, 2, "requeuing"), (2, 2, "failed"), (2, 3, "requeuing"), (5, 3, "failed")],
)
def test_broken_attempt_is_retried_while_attempts_are_left(
    status: AttemptStatus, sequence_id: int, max_attempts: int, expected: RolloutStatus
) -> None:
    config = RolloutConfig(max_attempts=max_attempts, retry_condition=[status])

    assert rollout_status_from_attempt(attempt(status, sequence_id=sequence_id), config) == expected


@pytest.mark.parametrize("status", BROKEN)
def test_broken_attempt_is_not_retried_under_another_condition(status: AttemptStatus) -> None:
    others = [other for other in BROKEN if other != status]

    assert (
        rollout_status_from_attempt(attempt(status), RolloutConfig(max_attempts=9, retry_condition=others)) == "failed"
    )


@pytest.mark.parametrize("status", ["cancelled", "queuing", "lost"])
def test_attempt_with_a_foreign_status_decides_nothing(status: str) -> None:
    strange = attempt().model_copy(update={"status": status})

    with pytest.raises(ValueError, match=f"Invalid attempt status: {status}"):
        rollout_status_from_attempt(strange, RolloutConfig())


@pytest.mark.parametrize(
    ("status", "end_time"),
    [("preparing", None), ("running", None), *((status, 7.5) for status in [*BROKEN, "succeeded"])],
)
def test_attempt_ends_when_it_no_longer_works(status: AttemptStatus, end_time: float | None) -> None:
    assert attempt_end_time(status, 7.5) == end_time


# ---------------------------------------------------------------------- spans as signs of life


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("preparing", "running"),
        ("running", "running"),
        ("unresponsive", "running"),
        ("timeout", "timeout"),
        ("failed", "failed"),
        ("succeeded", "succeeded"),
    ],
)
def test_span_moves_an_attempt_that_is_not_over(status: AttemptStatus, after: AttemptStatus) -> None:
    assert attempt_status_after_span(attempt(status), rollout("running")) == after


@pytest.mark.parametrize(
    ("rollout_status", "after"),
    [
        ("queuing", "running"),
        ("requeuing", "running"),
        ("preparing", "running"),
        ("running", "running"),
        ("failed", "unresponsive"),
        ("succeeded", "unresponsive"),
        ("cancelled", "unresponsive"),
    ],
)
def test_unresponsive_attempt_is_revived_unless_its_rollout_is_over(
    rollout_status: RolloutStatus, after: AttemptStatus
) -> None:
    assert attempt_status_after_span(attempt("unresponsive"), rollout(rollout_status)) == after


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("preparing", "running"),
        ("queuing", "running"),
        ("requeuing", "running"),
        ("running", "running"),
        ("failed", "failed"),
        ("succeeded", "succeeded"),
        ("cancelled", "cancelled"),
    ],
)
def test_span_of_a_running_attempt_moves_a_rollout_that_is_not_over(
    status: RolloutStatus, after: RolloutStatus
) -> None:
    assert rollout_status_after_span(rollout(status), "running") == after


@pytest.mark.parametrize("attempt_status", ["timeout", "failed", "succeeded", "unresponsive"])
@pytest.mark.parametrize("status", ["requeuing", "failed", "succeeded"])
def test_span_of_an_attempt_that_is_over_leaves_the_rollout_alone(
    status: RolloutStatus, attempt_status: AttemptStatus
) -> None:
    assert rollout_status_after_span(rollout(status), attempt_status) == status


# ---------------------------------------------------------------------- the end of patience

TIMEOUT = {"timeout_seconds": 10.0}
SILENCE = {"unresponsive_seconds": 5.0}


@pytest.mark.parametrize(
    ("config", "heartbeat", "elapsed", "expected"),
    [
        pytest.param({}, None, 1e9, None, id="endless-patience"),
        pytest.param(TIMEOUT, None, 9.0, None, id="before-the-timeout"),
        pytest.param(TIMEOUT, None, 10.0, None, id="at-the-timeout"),
        pytest.param(TIMEOUT, None, 10.001, "timeout", id="after-the-timeout"),
        pytest.param(TIMEOUT, START + 10, 10.001, "timeout", id="heartbeats-do-not-stop-a-timeout"),
        pytest.param({"timeout_seconds": 0.0}, None, 0.001, "timeout", id="no-patience-at-all"),
        pytest.param(SILENCE, None, 5.0, None, id="silent-just-long-enough"),
        pytest.param(SILENCE, None, 5.001, "unresponsive", id="silent-from-the-start"),
        pytest.param(SILENCE, START + 3, 5.001, None, id="heartbeat-moves-the-deadline"),
        pytest.param(SILENCE, START + 3, 8.0, None, id="at-the-moved-deadline"),
        pytest.param(SILENCE, START + 3, 8.001, "unresponsive", id="after-the-moved-deadline"),
        pytest.param({**TIMEOUT, **SILENCE}, None, 7.0, "unresponsive", id="silent-before-the-timeout"),
        pytest.param({**TIMEOUT, **SILENCE}, None, 11.0, "timeout", id="timeout-wins-over-silence"),
    ],
)
def test_patience_with_a_running_attempt_ends(
    config: dict[str, float], heartbeat: float | None, elapsed: float, expected: AttemptStatus | None
) -> None:
    assert overdue_status(rollout(**config), attempt("running", heartbeat), START + elapsed) == expected


@pytest.mark.parametrize(
    ("heartbeat", "elapsed", "expected"),
    [
        pytest.param(None, 1.0, None, id="no-sign-of-life-yet"),
        pytest.param(START + 1, 2.0, "running", id="heartbeat-without-a-span"),
        pytest.param(START + 1, 6.001, "unresponsive", id="heartbeat-too-long-ago"),
        pytest.param(START + 9, 10.001, "timeout", id="too-late-for-a-heartbeat"),
    ],
)
def test_patience_with_a_preparing_attempt_ends_or_shows_it_running(
    heartbeat: float | None, elapsed: float, expected: AttemptStatus | None
) -> None:
    subject = attempt("preparing", heartbeat)

    assert overdue_status(rollout("preparing", **TIMEOUT, **SILENCE), subject, START + elapsed) == expected


@pytest.mark.parametrize("status", ["failed", "succeeded"])
def test_attempt_that_has_ended_keeps_its_status_however_late(status: AttemptStatus) -> None:
    assert overdue_status(rollout(**TIMEOUT, **SILENCE), attempt(status), START + 1e6) == status


# ---------------------------------------------------------------------- when to look


@pytest.mark.parametrize(
    ("config", "heartbeat", "due"),
    [
        pytest.param({}, None, None, id="endless-patience"),
        pytest.param(TIMEOUT, None, START + 10, id="timeout"),
        pytest.param(TIMEOUT, START + 3, START + 10, id="timeout-whatever-the-heartbeat"),
        pytest.param(SILENCE, None, START + 5, id="silence-from-the-start"),
        pytest.param(SILENCE, START + 3, START + 8, id="silence-since-the-heartbeat"),
        pytest.param({**TIMEOUT, **SILENCE}, START + 3, START + 8, id="silence-comes-first"),
        pytest.param({**TIMEOUT, **SILENCE}, START + 9, START + 10, id="timeout-comes-first"),
        pytest.param({"timeout_seconds": 0.0}, None, START, id="no-patience-at-all"),
    ],
)
def test_running_attempt_is_due_at_the_earliest_limit(
    config: dict[str, float], heartbeat: float | None, due: float | None
) -> None:
    assert due_time(rollout(**config), attempt("running", heartbeat)) == due


@pytest.mark.parametrize(
    "subject",
    [attempt("failed"), attempt("succeeded"), attempt("preparing", heartbeat=START)],
    ids=["failed", "succeeded", "heartbeat-without-a-span"],
)
def test_attempt_the_rollout_has_not_heard_of_is_due_now(subject: Attempt) -> None:
    assert due_time(rollout(), subject) == DUE_NOW


@pytest.mark.parametrize("status", [status for status in ROLLOUT_STATUSES if status not in ("preparing", "running")])
def test_rollout_nobody_works_on_is_never_due(status: RolloutStatus) -> None:
    assert due_time(rollout(status, **TIMEOUT), attempt("running")) is None


def test_rollout_without_an_attempt_is_never_due() -> None:
    assert due_time(rollout(**TIMEOUT), None) is None


SECONDS = st.integers(min_value=0, max_value=10_000)


@given(timeout=st.none() | SECONDS, silence=SECONDS, heartbeat=st.none() | SECONDS.map(lambda s: START + s))
def test_attempt_is_overdue_right_after_it_is_due_and_not_before(
    timeout: int | None, silence: int, heartbeat: float | None
) -> None:
    subject = rollout(timeout_seconds=timeout, unresponsive_seconds=silence)
    running = attempt("running", heartbeat)

    due = due_time(subject, running)

    assert due is not None
    assert overdue_status(subject, running, due) is None
    assert overdue_status(subject, running, due + 1) in ("timeout", "unresponsive")


# ---------------------------------------------------------------------- attempts that were lost with their workers


def lost(sequence_id: int) -> Attempt:
    return attempt("unresponsive", sequence_id=sequence_id).model_copy(
        update={"metadata": {"error": loss_of("it died", START)}}
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rollout_of_a_lost_attempt_is_requeued_three_times(count: int) -> None:
    attempts = [lost(number + 1) for number in range(count)]

    assert rollout_status_from_attempts(attempts, RolloutConfig()) == "requeuing"
    assert rollout_status_from_attempts(attempts, RolloutConfig(requeue_lost=False)) == "failed"


def test_fourth_loss_counts_as_a_try() -> None:
    attempts = [lost(number + 1) for number in range(4)]
    patient = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])

    assert rollout_status_from_attempts(attempts, RolloutConfig()) == "failed"
    assert rollout_status_from_attempts(attempts, patient) == "requeuing"
    assert rollout_status_from_attempts([*attempts, lost(5)], patient) == "failed"


@pytest.mark.parametrize("status", BROKEN)
def test_attempt_that_was_not_lost_is_judged_as_ever(status: AttemptStatus) -> None:
    broken = attempt(status)

    for config in (RolloutConfig(), RolloutConfig(max_attempts=2, retry_condition=[status])):
        assert rollout_status_from_attempts([broken], config) == rollout_status_from_attempt(broken, config)


@pytest.mark.parametrize("error", [None, "WorkerLost", {"type": "ValueError"}, {}], ids=str)
def test_silence_without_the_mark_is_no_loss(error: Any) -> None:
    assert not is_lost(attempt("unresponsive").model_copy(update={"metadata": {"error": error}}))


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ({}, False),
        ({"last_dequeue_time": 0.0}, False),
        ({"last_heartbeat_time": 0.0}, True),
        ({"last_heartbeat_time": 0.0, "last_dequeue_time": 900.0}, False),
        ({"last_heartbeat_time": 0.0, "last_busy_time": 900.0}, False),
        ({"last_heartbeat_time": 0.0, "last_idle_time": 900.0}, True),
    ],
    ids=["none", "claims only", "heartbeat", "claim", "work", "ended by the store"],
)
def test_worker_is_silent_when_its_last_sign_is_old(signs: dict[str, float], expected: bool) -> None:
    worker = Worker(worker_id="w", **signs)  # type: ignore[arg-type] # all of them are times

    assert is_silent(worker, START, patience_seconds=300, counted_since=0.0) is expected
    assert not is_silent(worker, START, patience_seconds=300, counted_since=800.0)


@pytest.mark.parametrize("interval", [10**400, 1e308, float("inf"), float("nan")], ids=str)
def test_interval_beyond_reason_protects_nobody_for_ever(interval: Any) -> None:
    worker = Worker(worker_id="w", last_heartbeat_time=0.0, heartbeat_stats={"interval_seconds": interval})

    assert is_silent(worker, 4 * 3600.0, patience_seconds=300, counted_since=0.0)


@pytest.mark.parametrize("last_time", [10**400, float("nan"), -5, "now", START + 10_000], ids=str)
def test_report_at_an_impossible_time_is_none(last_time: Any) -> None:
    run = Run(run_id="r", name="fit", start_time=START, metadata={"reports": {"last_time": last_time}})

    assert run_as_seen(run, START + 300) is run
    assert run_as_seen(run, START + 301).end_time == START
