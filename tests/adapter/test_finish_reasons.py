"""Why answers ended: read from whatever a tracer or the proxy wrote, kept in trajectories, and told in reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.adapter import TraceReport, TraceToTrajectory, Trajectory, read_jsonl
from agentlightning.adapter.call_attributes import finish_reason_of
from tests.adapter.spans import CHAT, Conversation, span

TOLD = "gen_ai.completion.0.finish_reason"
TOOL_CALL = {"gen_ai.completion.0.tool_calls.0.name": "weather"}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("STOP", "stop"),
        ("end_turn", "stop"),
        ("MAX_TOKENS", "length"),
        ("incomplete", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("cancelled", "cancelled"),
        ("abort", "abort"),
        ("in_progress", None),
        (7, None),
    ],
)
def test_the_words_of_all_apis_become_one(word: object, reason: str | None) -> None:
    assert finish_reason_of({TOLD: word}) == reason


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param({"gen_ai.response.finish_reasons": ("length", "stop")}, "length", id="list"),
        pytest.param({"gen_ai.response.finish_reasons": '["length"]'}, "length", id="text-of-a-list"),
        pytest.param({"gen_ai.response.finish_reasons": []}, None, id="empty-list"),
        pytest.param({"gen_ai.response.finish_reason": "length"}, "length", id="agentops"),
        pytest.param({"agentlightning.operation.output.choices.0.finish_reason": "length"}, "length", id="weave"),
        pytest.param({"llm.openai.choices": json.dumps([{"finish_reason": "length"}])}, "length", id="raw"),
        pytest.param({"llm.openai.choices": "[]"}, None, id="raw-without-choices"),
        pytest.param({"llm.openai.choices": "{"}, None, id="raw-unreadable"),
        pytest.param({TOLD: "stop", "gen_ai.response.finish_reasons": ["length"]}, "stop", id="of-the-choice-first"),
        pytest.param({TOLD: "", "gen_ai.response.finish_reasons": ["length"]}, "length", id="empty-word"),
        pytest.param({TOLD: "completed", **TOOL_CALL}, "tool_calls", id="whole-with-tool-calls"),
        pytest.param({TOLD: "length", **TOOL_CALL}, "length", id="cut-within-tool-calls"),
        pytest.param({"agentlightning.response.is_cut": True}, "cancelled", id="reader-left"),
        pytest.param({TOLD: "in_progress", "agentlightning.response.is_cut": True}, "cancelled", id="left-early"),
        pytest.param({TOLD: "length", "agentlightning.response.is_cut": True}, "length", id="left-after-the-end"),
    ],
)
def test_the_reason_is_found_wherever_it_stands(attributes: dict[str, Any], reason: str | None) -> None:
    assert finish_reason_of(attributes) == reason


def turns(*reasons: str | None) -> Trajectory:
    """One sequence of several calls, of which each ended as it is told."""
    talk = Conversation()
    prompt = [0]
    for number, reason in enumerate(reasons, 1):
        ended: dict[str, Any] = {TOLD: reason}
        talk.call(prompt, [10 * number], **ended)
        prompt = [*prompt, 10 * number, number]
    return TraceToTrajectory().adapt(talk.spans)


def test_every_call_of_a_sequence_has_its_reason() -> None:
    (sequence,) = turns("tool_calls", "max_tokens", None).sequences

    assert [call.finish_reason for call in sequence.calls] == ["tool_calls", "length", None]
    assert [call.is_truncated for call in sequence.calls] == [False, True, False]


@pytest.mark.parametrize(
    ("reasons", "is_truncated"),
    [
        (("length", "stop"), True),
        (("stop", "length"), True),
        (("stop", "cancelled"), True),
        (("abort", "stop"), True),
        (("stop", "tool_calls"), False),
        ((None, None), False),
    ],
    ids=["before", "at-the-end", "reader-left", "broken-off", "whole", "unknown"],
)
def test_one_answer_that_was_cut_off_makes_the_sequence_truncated(
    reasons: tuple[str | None, ...], is_truncated: bool
) -> None:
    (sequence,) = turns(*reasons).sequences

    assert sequence.is_truncated is is_truncated


def test_the_reason_is_taken_from_the_other_span_of_the_call_where_the_one_with_tokens_lacks_it() -> None:
    ids = {"prompt_token_ids": [1], "response_token_ids": [2], "gen_ai.response.id": "r"}
    asked = span("sdk", name=CHAT, attributes={"gen_ai.response.id": "r", TOLD: "length"}, sequence_id=1)
    passed_on = span("proxy", "sdk", name="litellm_request", attributes=ids, sequence_id=1)

    (sequence,) = TraceToTrajectory().adapt([asked, passed_on]).sequences

    assert [(call.span_id, call.finish_reason) for call in sequence.calls] == [("sdk", "length")]


def test_files_without_reasons_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    told = turns("length").model_dump(mode="json")
    for call in told["sequences"][0]["calls"]:
        del call["finish_reason"]
    path.write_text(json.dumps(told) + "\n", encoding="utf-8")

    (trajectory,) = read_jsonl(path)

    assert [call.finish_reason for call in trajectory.sequences[0].calls] == [None]


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (("stop", "length"), "1 of 2 answers was cut off."),
        (("length", "length", None), "2 of 3 answers were cut off."),
        (("length",), "1 of 1 answer was cut off."),
    ],
    ids=["one", "two", "only"],
)
def test_a_report_says_how_many_answers_were_cut_off(reasons: tuple[str | None, ...], words: str) -> None:
    assert words in str(TraceReport.of(turns(*reasons))).splitlines()
