"""The rules of the circuit breaker."""

import pytest

from agentlightning.llm_proxy.backends.breaker import FAILURES_TO_OPEN, Breaker


def opened(now: float = 0.0, *, curable: bool = False) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now, curable=curable)
    return breaker


def test_opens_with_the_fifth_failure_in_a_row() -> None:
    breaker = Breaker()

    assert [breaker.failed(0.0, curable=False) for _ in range(5)] == [False, False, False, False, True]
    assert not breaker.allows(9.9)


def test_whole_answer_in_between_begins_the_count_anew() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker.failed(0.0, curable=False)
        breaker.answered()
        breaker.completed()

    assert breaker.state == "closed"


def test_answers_that_begin_and_break_open_it_too() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.answered()
        breaker.failed(0.0, curable=False)

    assert breaker.state == "open"


def test_one_probe_passes_after_the_hold() -> None:
    breaker = opened()

    assert breaker.allows(10.0)
    breaker.begin(10.0)
    assert breaker.state == "half-open"
    assert not breaker.allows(10.0)


def test_hold_doubles_up_to_a_minute_with_every_probe_that_fails() -> None:
    breaker, now, holds = opened(), 0.0, []
    for _ in range(5):
        holds.append(breaker.opens_until - now)
        now = breaker.opens_until
        breaker.begin(now)
        breaker.failed(now, curable=False)

    assert holds == [10.0, 20.0, 40.0, 60.0, 60.0]


def test_probe_that_is_answered_closes_it_on_probation() -> None:
    breaker = opened()
    breaker.begin(10.0)
    breaker.answered()

    assert breaker.allows(10.0)
    assert breaker.failed(10.0, curable=False)
    assert breaker.opens_until == 30.0


def test_whole_answer_ends_the_probation() -> None:
    breaker = opened()
    breaker.begin(10.0)
    breaker.answered()
    breaker.completed()

    assert not breaker.failed(11.0, curable=False)
    assert opened().opens_until == 10.0


def test_probe_that_was_given_up_can_be_made_again() -> None:
    breaker = opened()
    breaker.begin(10.0)
    breaker.abandoned(11.0)

    assert breaker.allows(11.0)


@pytest.mark.parametrize("curable", [True, False])
def test_health_check_brings_back_only_what_could_not_be_reached(curable: bool) -> None:
    breaker = opened(curable=curable)

    assert breaker.cured() is curable
    assert breaker.allows(0.0) is curable


def test_backend_that_relapses_after_a_health_check_needs_a_probe() -> None:
    breaker = opened(curable=True)
    breaker.cured()
    breaker.failed(1.0, curable=True)

    assert not breaker.cured()
    breaker.begin(breaker.opens_until)
    breaker.failed(breaker.opens_until, curable=True)
    assert breaker.cured()
