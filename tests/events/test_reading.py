"""Spans become events."""

from typing import Any

import pytest

from agentlightning.events import (
    AgentEvent,
    AgentReply,
    BinaryReward,
    CompleteEvent,
    DataEvent,
    ErrorEvent,
    NumericReward,
    StartEvent,
    ToolCall,
    UserMessage,
    events_of,
    events_of_spans,
)
from agentlightning.types import Event, Span, TraceStatus


def span(name: str = "step", attributes: dict[str, Any] | None = None, **fields: Any) -> Span:
    times = {"start_time": 1.0, "end_time": 2.0}
    return Span.from_attributes(name=name, attributes=attributes or {}, **{**times, **fields})


def kinds(events: list[AgentEvent]) -> list[str]:
    return [event.kind for event in events]


@pytest.mark.parametrize(
    ("name", "attributes", "kind", "value"),
    [
        ("agentlightning.reward", {"reward": 2}, NumericReward, 2.0),
        ("agentlightning.reward", {"reward": True}, BinaryReward, 1.0),
        ("x", {"agentops.task.output": '{"type": "reward", "value": 0.25}'}, NumericReward, 0.25),
        ("x", {"agentops.entity.output": '{"type": "reward", "value": false}'}, BinaryReward, 0.0),
        ("x", {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 3.0}, NumericReward, 3.0),
    ],
    ids=["int", "bool", "agentops-task", "agentops-entity", "named"],
)
def test_reward_is_read_in_every_format(
    name: str, attributes: dict[str, Any], kind: type[NumericReward], value: float
) -> None:
    (event,) = events_of(span(name, attributes))
    assert type(event) is kind
    assert isinstance(event, (NumericReward, BinaryReward))
    assert event.value == value


@pytest.mark.parametrize("attributes", [{"agentops.task.output": "not json"}, {"reward": 1.0}], ids=["text", "name"])
def test_span_without_a_reward_is_work(attributes: dict[str, Any]) -> None:
    assert kinds(events_of(span("x", attributes))) == ["state.start", "state.complete"]


@pytest.mark.parametrize("attributes", [{"message": "hi"}, {"agentlightning.message.body": "hi"}], ids=["0.2", "0.3"])
def test_emitted_message_is_said_by_its_agent(attributes: dict[str, Any]) -> None:
    (event,) = events_of(span("agentlightning.message", attributes), agent="critic")
    assert isinstance(event, AgentReply)
    assert (event.text, event.sender, event.role, event.time) == ("hi", "critic", "assistant", 2.0)


@pytest.mark.parametrize(
    ("attributes", "value"),
    [
        ({"object": '{"a": [1]}'}, {"a": [1]}),
        ({"agentlightning.object.type": "int", "agentlightning.object.literal": 3}, 3),
        ({"agentlightning.object.type": "bytes", "agentlightning.object.literal": "AAE="}, b"\x00\x01"),
        ({"agentlightning.object.type": "bytes", "agentlightning.object.literal": "?"}, "?"),
        ({"agentlightning.object.json": "{broken"}, "{broken"),
        ({}, None),
    ],
    ids=["0.2", "literal", "bytes", "broken-bytes", "broken-json", "empty"],
)
def test_object_is_read_in_every_format(attributes: dict[str, Any], value: Any) -> None:
    (event,) = events_of(span("agentlightning.object", attributes))
    assert isinstance(event, DataEvent)
    assert event.value == value


def test_exception_span_is_an_error() -> None:
    told = {"exception.type": "ValueError", "exception.message": "no", "exception.escaped": True}
    (event,) = events_of(span("agentlightning.exception", told))
    assert isinstance(event, ErrorEvent)
    assert (event.error_type, event.message) == ("ValueError", "no")


def test_failed_work_ends_with_the_exception_it_recorded() -> None:
    failed = span(status=TraceStatus(status_code="ERROR", description="it broke"))
    failed.events.append(Event(name="exception", attributes={"exception.type": "KeyError"}))

    start, error = events_of(failed)

    assert isinstance(start, StartEvent)
    assert isinstance(error, ErrorEvent)
    assert (start.time, error.time, error.error_type, error.message) == (1.0, 2.0, "KeyError", "it broke")


def test_unfinished_work_has_only_started() -> None:
    assert kinds(events_of(span(end_time=None))) == ["state.start"]


MODEL_CALL = {
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "old question",
    "gen_ai.prompt.1.role": "assistant",
    "gen_ai.prompt.1.content": "old answer",
    "gen_ai.prompt.2.role": "user",
    "gen_ai.prompt.2.content": "new question",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "I look.",
    "gen_ai.completion.0.tool_calls.0.id": "c1",
    "gen_ai.completion.0.tool_calls.0.name": "weather",
    "gen_ai.completion.0.tool_calls.0.arguments": '{"city": "Oslo"}',
}


def test_model_call_says_what_is_new_in_it() -> None:
    start, asked, said, call, done = events_of(span("openai.chat.completion", MODEL_CALL), agent="guide")

    assert isinstance(start, StartEvent)
    assert isinstance(done, CompleteEvent)
    assert isinstance(asked, UserMessage)
    assert isinstance(said, AgentReply)
    assert isinstance(call, ToolCall)
    assert (asked.text, asked.sender) == ("new question", "user")
    assert (said.text, said.sender) == ("I look.", "guide")
    assert (call.tool, call.text, call.call_id, call.sender) == ("weather", '{"city": "Oslo"}', "c1", "guide")


def test_span_of_a_tool_is_its_call_with_the_result() -> None:
    told = {"tool.name": "weather", "tool.parameters": "{}", "tool.call.id": "c1", "tool.result": "rain"}
    _, call, _ = events_of(span("tool", told))
    assert isinstance(call, ToolCall)
    assert (call.tool, call.call_id, call.result) == ("weather", "c1", "rain")


def test_agent_is_the_nearest_around_the_span() -> None:
    inner = span("llm", span_id="c", parent_id="b")
    middle = span("chain", span_id="b", parent_id="a")
    outer = span("agent", {"agent.name": "critic"}, span_id="a")

    events = events_of_spans([inner, middle, outer, span("other", span_id="d")])

    assert [event.agent for event in events] == ["critic"] * 6 + [None] * 2


@pytest.mark.parametrize("is_traced", [True, False])
def test_what_was_said_in_a_call_that_the_proxy_saw_too_is_told_once(is_traced: bool) -> None:
    said = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "hi", "gen_ai.completion.0.content": "hello"}
    call = {**said, "gen_ai.response.id": "r1"}
    agent = span("solver", {"agent.name": "solver"}, span_id="a" * 16)
    traced = span("openai.chat.completion", call, span_id="b" * 16, parent_id="a" * 16)
    proxied = span("litellm_request", call, span_id="c" * 16)

    events = events_of_spans([proxied, *([traced] if is_traced else []), agent])

    told = [event for event in events if isinstance(event, (UserMessage, AgentReply))]
    assert [event.text for event in told] == ["hi", "hello"]
    assert {event.agent for event in told} == {"solver" if is_traced else None}
    assert kinds(events).count(StartEvent.kind) == (3 if is_traced else 2)
