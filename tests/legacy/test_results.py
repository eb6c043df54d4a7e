"""What an agent returned as a result, a result as spans, and spans as a trace."""

import json
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.legacy.results import (
    entry_from_span,
    rollout_from_result,
    span_from_entry,
    spans_of,
)
from agentlightning.semconv import AGL_REWARD
from agentlightning.types import Attempt, RolloutLegacy, Span, SpanNames, Task, Triplet
from agentlightning.utils.json_values import JsonObject

TASK = Task(rollout_id="rollout-1", input="hello")
ATTEMPT = Attempt(rollout_id="rollout-1", attempt_id="at-1", sequence_id=1, start_time=1000.0)
WHOLE_SECONDS = 1_700_000_000_000_000_000
"""Nanoseconds that the SDK and we round alike; it cuts off fractions of a microsecond, we round them."""


@pytest.fixture
def recorded() -> list[Any]:
    """Two spans of the OpenTelemetry SDK, the second a reward inside the first."""
    provider = TracerProvider()
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("agent", attributes={"tokens": [1, 2]}) as agent:
        agent.add_event("thought", {"depth": 1})
        with tracer.start_as_current_span(AGL_REWARD, attributes={"reward": 0.5}) as reward:
            pass
    provider.shutdown()
    return [agent, reward]


# ---------------------------------------------------------------------- from what an agent returned


@pytest.mark.parametrize(
    ("result", "fields"),
    [
        (None, {}),
        (0.5, {"final_reward": 0.5}),
        (1, {"final_reward": 1.0}),
        (True, {"final_reward": 1.0}),
        ("some text", {"metadata": {"result": "some text"}}),
        ({"final_reward": 0.5, "logs": ["a"]}, {"final_reward": 0.5, "logs": ["a"]}),
        ({"final_reward": 0.5, "unknown": "x"}, {"final_reward": 0.5}),
        ({"answer": "4", "steps": 2}, {"metadata": {"result": {"answer": "4", "steps": 2}}}),
        ({"speed": 0.5, "reward": 1}, {"final_reward": 1.0, "metadata": {"result": {"speed": 0.5, "reward": 1}}}),
        ({}, {"metadata": {"result": {}}}),
        (b"x", {"metadata": {"result": "b'x'"}}),
        ([1.0], {"metadata": {"result": [1.0]}}),
        ([], {"trace": []}),
        ([{"name": "step"}], {"trace": [{"name": "step"}]}),
        (
            [Triplet(prompt="p", response="r", reward=0.5)],
            {"triplets": [Triplet(prompt="p", response="r", reward=0.5)], "final_reward": 0.5},
        ),
    ],
    ids=lambda case: type(case).__name__,
)
def test_a_raw_result_becomes_a_rollout(result: object, fields: dict[str, Any]) -> None:
    assert rollout_from_result(TASK, result) == RolloutLegacy(rollout_id="rollout-1", task=TASK, **fields)


def test_a_ready_rollout_gets_the_id_of_its_task() -> None:
    result = rollout_from_result(TASK, RolloutLegacy(rollout_id="other", final_reward=1.0))

    assert result == RolloutLegacy(rollout_id="rollout-1", task=TASK, final_reward=1.0)


def test_recorded_spans_become_a_trace_with_its_reward(recorded: list[Any]) -> None:
    result = rollout_from_result(TASK, recorded)

    assert result.trace == [json.loads(span.to_json()) for span in recorded]
    assert result.final_reward == 0.5


def test_a_list_of_several_kinds_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"a list of \['Triplet', 'dict'\]; .* may hold one kind of them only"):
        rollout_from_result(TASK, [{"name": "a"}, Triplet(prompt="p", response="r")])


# ---------------------------------------------------------------------- traces


def test_a_recorded_span_survives_the_way_through_json(recorded: list[Any]) -> None:
    for position, span in enumerate(recorded):
        read = span_from_entry(json.loads(span.to_json()), ATTEMPT, position)
        direct = Span.from_opentelemetry(span, "rollout-1", "at-1", 0)

        assert (read.trace_id, read.span_id, read.parent_id) == (direct.trace_id, direct.span_id, direct.parent_id)
        assert (read.name, read.attributes, read.status) == (direct.name, direct.attributes, direct.status)
        assert (read.context, read.parent, read.resource) == (direct.context, direct.parent, direct.resource)
        assert read.start_time == pytest.approx(direct.start_time, abs=1e-5)
        assert [event.name for event in read.events] == [event.name for event in direct.events]


def test_a_stored_span_is_written_as_the_sdk_writes_it(recorded: list[Any]) -> None:
    for span in recorded:
        span._start_time, span._end_time = WHOLE_SECONDS, WHOLE_SECONDS + 5_000_000_000
        for event in span.events:
            event._timestamp = WHOLE_SECONDS

        assert entry_from_span(Span.from_opentelemetry(span, "rollout-1", "at-1", 1)) == json.loads(span.to_json())


def test_an_entry_that_is_no_span_is_kept_as_an_object() -> None:
    span = span_from_entry({"step": 1}, ATTEMPT, 0)

    assert (span.name, span.attributes) == (SpanNames.OBJECT.value, {"object": '{"step": 1}'})


def test_odd_parts_of_an_entry_are_kept_as_text_or_left_out() -> None:
    entry = {
        "name": "step",
        "attributes": {"nested": {"a": 1}, "mixed": [1, "a"], "none": None, "fine": ["a", "b"]},
        "events": [{"name": "e", "timestamp": 5.0}, "no event"],
        "context": {"span_id": 2},
        "status": "fine",
        "start_time": 1_700_000_000_000_000_000,
        "end_time": "yesterday",
        "resource": None,
        "parent_id": "0xa",
    }

    span = span_from_entry(entry, ATTEMPT, 0)

    assert span.attributes == {"nested": '{"a": 1}', "mixed": '[1, "a"]', "fine": ["a", "b"]}
    assert [(event.name, event.timestamp) for event in span.events] == [("e", 5.0)]
    assert (span.span_id, span.parent_id) == ("0000000000000002", "000000000000000a")
    assert span.status.status_code == "UNSET"
    assert (span.start_time, span.end_time) == (1_700_000_000.0, None)


# ---------------------------------------------------------------------- rewards and spans


def test_a_reward_that_the_trace_tells_is_not_told_again(recorded: list[Any]) -> None:
    rollout = rollout_from_result(TASK, recorded)

    same = spans_of(rollout, ATTEMPT)
    other = spans_of(rollout.model_copy(update={"final_reward": 1.0}), ATTEMPT)

    assert [span.name for span in same] == ["agent", AGL_REWARD]
    assert other[-1].attributes == {"reward": 1.0}


def test_triplets_beside_a_trace_add_no_model_calls() -> None:
    rollout = RolloutLegacy(rollout_id="rollout-1", trace=[{"name": "s"}], triplets=[Triplet(prompt="p", response="r")])

    assert [span.name for span in spans_of(rollout, ATTEMPT)] == ["s"]


def test_messages_and_log_probabilities_of_a_triplet_are_kept() -> None:
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ["Hi"]}]
    response = {"token_ids": [1], "logprobs": [-0.5]}
    rollout = RolloutLegacy(rollout_id="rollout-1", triplets=[Triplet(prompt=prompt, response=response)])

    (span,) = spans_of(rollout, ATTEMPT)

    assert {name: value for name, value in span.attributes.items() if "prompt" in name} == {
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be kind.",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": '["Hi"]',
    }
    assert (span.attributes["response_token_ids"], span.attributes["logprobs.content"]) == ("[1]", "[-0.5]")


def test_the_same_result_gives_spans_of_the_same_ids() -> None:
    rollout = RolloutLegacy(rollout_id="rollout-1", final_reward=1.0, trace=[{"name": "a"}, {"name": "a"}, {"x": 1}])

    first, again = ([span.span_id for span in spans_of(rollout, ATTEMPT)] for _ in range(2))

    assert first == again
    assert len(set(first)) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"token_ids": [2**70]}, "response": {"token_ids": [1], "logprobs": [2**70]}},
        {"prompt": {"token_ids": "12"}, "response": {"token_ids": {"a": 1}}},
        {"prompt": [{"role": 1, "content": {"a": [2**70]}, "tool_calls": ["x", 2]}], "response": [{}]},
        {"prompt": None, "response": 5, "metadata": {"response_id": 7}},
    ],
    ids=["large numbers", "no lists", "odd messages", "nothing"],
)
def test_odd_triplets_are_kept_as_model_calls(fields: JsonObject) -> None:
    rollout = RolloutLegacy(rollout_id="rollout-1", triplets=[Triplet(**fields)])

    (span,) = spans_of(rollout, ATTEMPT)

    assert span.name == "openai.chat.completion"
    assert TracerTraceToTriplet().adapt([span])
