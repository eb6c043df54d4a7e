"""Rewards: written for both releases, read in three formats."""

import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.emitter import (
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)
from agentlightning.legacy.results import final_reward_of as legacy_final_reward_of
from agentlightning.tracer.binding import Recorder
from agentlightning.types import Span
from agentlightning.types.rewards import final_reward_of
from tests import warm_python

NAN = float("nan")


def span(name: str = "step", **attributes: Any) -> Span:
    made = Span.from_attributes(name=name, attributes={})
    made.attributes = {key.replace("__", "."): value for key, value in attributes.items()}
    return made


@pytest.mark.parametrize(("value", "written"), [(0.5, 0.5), (1, 1.0), (-2, -2.0)])
def test_a_number_is_written_for_both_releases(trace: Recorder, value: Any, written: float) -> None:
    emitted = emit_reward(value)

    (recorded,) = trace.spans()
    assert recorded.name == "agentlightning.reward"
    assert recorded.attributes == {
        "reward": written,
        "agentlightning.reward.0.name": "primary",
        "agentlightning.reward.0.value": written,
    }
    assert isinstance(recorded.attributes["reward"], float)
    assert isinstance(emitted, ReadableSpan)
    assert get_reward_value(emitted) == written


@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_a_number_and_says_that_it_is_binary(trace: Recorder, value: bool) -> None:
    emitted = emit_reward(value)

    (recorded,) = trace.spans()
    assert recorded.attributes == {
        "reward": float(value),
        "agentlightning.reward.0.name": "primary",
        "agentlightning.reward.0.value": float(value),
        "agentlightning.event.kind": "reward.binary",
    }
    assert get_reward_value(emitted) == float(value)


def test_a_kind_of_the_callers_own_is_kept(trace: Recorder) -> None:
    emitted = emit_reward(reward=True, attributes={"agentlightning.event.kind": "reward.numeric"})
    assert (emitted.attributes or {})["agentlightning.event.kind"] == "reward.numeric"


def test_of_several_rewards_the_primary_comes_first(trace: Recorder) -> None:
    emitted = emit_reward({"style": 0.25, "truth": 1}, primary_key="truth", attributes={"judge": "me"})

    assert get_reward_value(emitted) == 1.0
    assert [(item.name, item.value) for item in get_rewards_from_span(emitted)] == [("truth", 1.0), ("style", 0.25)]
    assert emitted.attributes is not None
    assert emitted.attributes["judge"] == "me"


def test_of_rewards_in_a_row_the_last_one_counts(trace: Recorder) -> None:
    emitted = emit_reward([0.25, 0.5, True])
    assert get_reward_value(emitted) == 1.0
    assert [item.name for item in get_rewards_from_span(emitted)] == ["2", "0", "1"]


def test_of_rewards_in_a_row_another_one_may_be_chosen(trace: Recorder) -> None:
    assert get_reward_value(emit_reward((0.25, 0.5), primary_key=0)) == 0.25


@pytest.mark.parametrize(
    ("value", "options", "told"),
    [
        (None, {}, "must be a number"),
        ("1.0", {}, "must be a number"),
        (NAN, {}, "finite"),
        ({"a": 1.0}, {}, "primary_key is None"),
        ({"a": 1.0}, {"primary_key": "b"}, "primary_key is 'b'"),
        ({"a": "1"}, {"primary_key": "a"}, "'a' must be a number"),
        ([], {}, "must be a number"),
        ([1.0, None], {}, "1 must be a number"),
        ([1.0], {"primary_key": 3}, "positions 0 to 0"),
    ],
)
def test_what_is_no_reward_is_refused(trace: Recorder, value: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        emit_reward(value, **options)
    assert trace.spans() == []


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (span("agentlightning.reward", reward=0.5), 0.5),
        (span("agentlightning.annotation", agentlightning__reward__0__value=0.75), 0.75),
        (span(agentops__task__output='{"type": "reward", "value": 1.0}'), 1.0),
        (span(agentops__entity__output={"type": "reward", "value": 0.25}), 0.25),
        (span(agentops__task__output='{"type": "reward", "value": null}'), None),
        (span(agentops__task__output="not json"), None),
        (span(agentops__task__output='{"type": "tool"}'), None),
        (span("other", reward=0.5), None),
        (span("agentlightning.reward"), None),
    ],
    ids=["0.2", "0.3", "agentops", "agentops dict", "agentops none", "text", "tool", "other", "empty"],
)
def test_rewards_are_read_in_every_format(given: Span, value: float | None) -> None:
    assert get_reward_value(given) == value
    assert is_reward_span(given) == (value is not None)
    assert [item.value for item in get_rewards_from_span(given)] == ([] if value is None else [value])


@pytest.mark.parametrize(
    "given",
    [
        span("agentlightning.reward", reward="high"),
        span("agentlightning.annotation", agentlightning__reward__0__value="high"),
        span(agentops__task__output='{"type": "reward", "value": "high"}'),
    ],
    ids=["0.2", "0.3", "agentops"],
)
def test_a_reward_that_is_no_number_is_logged_and_is_none_for_every_reader(
    given: Span, caplog: pytest.LogCaptureFixture
) -> None:
    assert get_reward_value(given) is None
    assert find_final_reward([given]) is final_reward_of([given]) is None
    assert get_rewards_from_span(given) == []
    assert legacy_final_reward_of([given]) is None
    assert "'high', which is not a number" in caplog.text


def test_every_reader_leaves_out_a_further_reward_that_is_no_number() -> None:
    given = span(agentlightning__reward__0__value=0.5, agentlightning__reward__1__value="high")
    assert [item.value for item in get_rewards_from_span(given)] == [0.5]


def test_every_reader_takes_the_numbered_reward_of_a_span_that_has_a_plain_one_too() -> None:
    given = span("agentlightning.reward", reward=1.0, agentlightning__reward__0__value=2.0)
    assert [read([given]) for read in (find_final_reward, final_reward_of, legacy_final_reward_of)] == [2.0] * 3


def test_the_last_reward_is_final() -> None:
    spans = [span("agentlightning.reward", reward=0.1), span(), span("agentlightning.reward", reward=0.2), span()]
    assert find_final_reward(spans) == 0.2
    assert find_reward_spans(spans) == [spans[0], spans[2]]
    assert find_final_reward([]) is None


async def test_the_decorator_records_what_a_function_returns(trace: Recorder) -> None:
    with pytest.warns(DeprecationWarning, match="emit_reward"):

        @reward
        def judge(value: float | None) -> float | None:
            return value

    with pytest.warns(DeprecationWarning, match="emit_reward"):

        @reward
        async def judge_async() -> float:
            return 0.75

    assert (judge(0.25), judge(None), await judge_async()) == (0.25, None, 0.75)
    assert [get_reward_value(recorded) for recorded in trace.spans()] == [0.25, 0.75]


def test_the_old_module_warns_and_can_be_called() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import agentlightning.reward
    from agentlightning.reward import emit_reward, find_final_reward
    @agentlightning.reward
    def judge(): return 1.0
print(judge.__name__, [warning.category.__name__ for warning in told])
"""

    done = warm_python.run([sys.executable, "-c", code], check=True)

    assert done.stdout == "judge ['DeprecationWarning', 'DeprecationWarning']\n"
