"""The rules of a rollout's life, as tables; time is an argument, so nothing waits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.store.lifecycle import (
    DUE_NOW,
    ROLLOUT_STATUSES,
    due_time,
    lease_seconds,
    loss_of,
    overdue_status,
    rollout_status_from_attempt,
    rollout_status_from_attempts,
    run_as_seen,
    worker_as_seen,
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


# ---------------------------------------------------------------------- from the attempt to the rollout


@pytest.mark.parametrize("status", BROKEN)
def test_broken_attempt_is_retried_under_its_condition_while_attempts_are_left(status: AttemptStatus) -> None:
    own = RolloutConfig(max_attempts=2, retry_condition=[status])
    others = RolloutConfig(max_attempts=9, retry_condition=[other for other in BROKEN if other != status])

    decided = [rollout_status_from_attempt(attempt(status, sequence_id=number), own) for number in (1, 2, 5)]

    assert decided == ["requeuing", "failed", "failed"]
    assert rollout_status_from_attempt(attempt(status), others) == "failed"


@pytest.mark.parametrize("status", ["cancelled", "queuing", "lost"])
def test_attempt_with_a_foreign_status_decides_nothing(status: str) -> None:
    strange = attempt().model_copy(update={"status": status})
    with pytest.raises(ValueError, match=f"Invalid attempt status: {status}"):
        rollout_status_from_attempt(strange, RolloutConfig())


# ---------------------------------------------------------------------- the end of patience

TIMEOUT = {"timeout_seconds": 10.0}
SILENCE = {"unresponsive_seconds": 5.0}


@pytest.mark.parametrize(
    ("config", "heartbeat", "elapsed", "expected"),
    [
        pytest.param({}, None, 1e9, None, id="endless-patience"),
        pytest.param(TIMEOUT, None, 10.0, None, id="at-the-timeout"),
        pytest.param(TIMEOUT, None, 10.001, "timeout", id="after-the-timeout"),
        pytest.param(TIMEOUT, START + 10, 10.001, "timeout", id="heartbeats-do-not-stop-a-timeout"),
        pytest.param(SILENCE, None, 5.0, None, id="silent-just-long-enough"),
        pytest.param(SILENCE, None, 5.001, "unresponsive", id="silent-from-the-start"),
        pytest.param(SILENCE, START + 3, 5.001, None, id="heartbeat-moves-the-deadline"),
        pytest.param(SILENCE, START + 3, 8.001, "unresponsive", id="after-the-moved-deadline"),
        pytest.param({**TIMEOUT, **SILENCE}, None, 7.0, "unresponsive", id="silent-before-the-timeout"),
        pytest.param({**TIMEOUT, **SILENCE}, None, 11.0, "timeout", id="timeout-wins-over-silence"),
    ],
)
def test_patience_with_a_running_attempt_ends(
    config: dict[str, float], heartbeat: float | None, elapsed: float, expected: AttemptStatus | None
) -> None:
    assert overdue_status(rollout(**config), attempt("running", heartbeat), START + elapsed) == expected


# ---------------------------------------------------------------------- when to look


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


def test_fourth_loss_counts_as_a_try() -> None:
    attempts = [lost(number + 1) for number in range(4)]
    patient = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])

    assert rollout_status_from_attempts(attempts, RolloutConfig()) == "failed"
    assert rollout_status_from_attempts(attempts, patient) == "requeuing"
    assert rollout_status_from_attempts([*attempts, lost(5)], patient) == "failed"


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
def test_worker_is_unknown_when_its_last_sign_is_old(signs: dict[str, float], expected: bool) -> None:
    worker = Worker(worker_id="w", status="busy", **signs)  # type: ignore[arg-type] # all of them are times
    assert (worker_as_seen(worker, START, 300).status == "unknown") is expected


@pytest.mark.parametrize(
    ("interval", "longest_seconds"),
    [(each, 300) for each in ("often", -1, 0, True, None, [1], {"a": 1}, float("nan"))]
    + [(200, 600), (10**400, 3 * 3600), (1e308, 3 * 3600), (float("inf"), 3 * 3600)],
    ids=str,
)
def test_lease_lasts_three_beats_of_an_interval_within_reason(interval: Any, longest_seconds: int) -> None:
    assert lease_seconds(300, interval) == longest_seconds


@pytest.mark.parametrize("last_time", [10**400, float("nan"), -5, "now", START + 10_000], ids=str)
def test_report_at_an_impossible_time_is_none(last_time: Any) -> None:
    run = Run(run_id="r", name="fit", start_time=START, metadata={"reports": {"last_time": last_time}})
    assert run_as_seen(run, START + 300) is run
    assert run_as_seen(run, START + 301).end_time == START
