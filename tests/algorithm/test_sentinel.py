"""The sentinel: alarms for a training that finds a loophole in its reward, and none for a healthy one."""

import random
from typing import Any

import pytest

from agentlightning.algorithm.comparison import gain_summary
from agentlightning.algorithm.sentinel import Sentinel, alarms_of
from agentlightning.errors import ConfigurationError
from tests.algorithm.sequences import rewarded


def test_a_step_is_measured_by_length_diversity_and_the_watched_reward() -> None:
    step = [rewarded("a", [1, 2], main=1.0, quality=0.25), rewarded("b", [1, 2, 3, 4], main=1.0, quality=0.75)]
    figures = Sentinel("quality").figures(step)
    assert figures == {"answers/tokens": 3.0, "answers/distinct": 1.0, "watched/mean": 0.5, "watched/error": 0.25}


def test_a_function_may_judge_what_is_watched() -> None:
    figures = Sentinel(lambda one: float(len(one.spans))).figures([rewarded("a", [1], main=1.0)])
    assert figures["watched/mean"] == 2.0


def test_what_is_no_reward_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="give the name of a reward"):
        Sentinel(7)  # type: ignore[arg-type]


def noisy(start: float, end: float, seed: int, steps: int = 24, error: float = 0.03) -> list[float]:
    chance = random.Random(seed)
    return [start + (end - start) * step / steps + chance.gauss(0, error) for step in range(steps)]


@pytest.mark.parametrize("seed", range(3))
def test_a_loophole_is_found_and_a_healthy_run_left_alone(seed: int) -> None:
    errors = [0.03] * 24
    hacked = {"reward/mean": noisy(0.2, 0.9, seed), "watched/mean": noisy(0.6, 0.2, -seed), "watched/error": errors}
    healthy = {"reward/mean": noisy(0.2, 0.9, seed), "watched/mean": noisy(0.3, 0.4, -seed), "watched/error": errors}
    flat = {"reward/mean": noisy(0.2, 0.9, seed), "watched/mean": noisy(0.5, 0.5, -seed), "watched/error": errors}

    assert [alarm.name for alarm in alarms_of(hacked)] == ["reward_hacking"]
    assert alarms_of(healthy) == alarms_of(flat) == []


@pytest.mark.parametrize(
    ("name", "start", "end", "alarm"),
    [
        ("answers/tokens", 20.0, 200.0, "length"),
        ("learner/entropy", 1.0, 5.0, "entropy"),
        ("answers/distinct", 1.0, -0.1, "diversity"),
        ("answers/tokens", 20.0, 40.0, None),
        ("learner/entropy", 1.0, 0.01, None),
        ("answers/distinct", 0.9, 0.6, None),
    ],
)
def test_curves_that_run_away_are_alarms(name: str, start: float, end: float, alarm: str | None) -> None:
    found = alarms_of({name: noisy(start, end, 1, error=0.0)})
    assert [one.name for one in found] == ([] if alarm is None else [alarm])


def test_an_alarm_is_raised_once_and_forgotten_with_the_run() -> None:
    sentinel = Sentinel()
    raised: list[Any] = []
    for tokens in (10, 10, 10, 10, 100, 100, 100, 100, 100):
        raised += sentinel.look({"answers/tokens": tokens})

    assert [alarm.name for alarm in raised] == ["length"]
    sentinel.begin()
    assert sentinel.alarms == []


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([0.0] * 40, [1.0] * 40, "better"),
        ([0.0, 1.0] * 20, [1.0, 0.0] * 20, "not better"),
        ([0.0] * 40 + [None], [1.0] * 40 + [1.0], "better"),
    ],
)
def test_the_gain_of_a_training_is_tested_in_pairs(before: list[Any], after: list[Any], verdict: str) -> None:
    gain = gain_summary(before, after)["gain"]
    assert (gain["verdict"], gain["n"], gain["low"] <= gain["mean"] <= gain["high"]) == (verdict, 40, True)


def test_validations_of_other_tasks_have_no_gain() -> None:
    assert gain_summary([1.0], [1.0, 0.0]) == gain_summary([None], [1.0]) == {}
