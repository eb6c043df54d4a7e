"""Runs with several agents, added up."""

from agentlightning.events import (
    AgentEvent,
    AgentReply,
    CompleteEvent,
    ErrorEvent,
    NamedReward,
    NumericReward,
    Progress,
    SequenceReward,
    StartEvent,
    ToolCall,
    by_agent,
    by_task,
)

RUN: list[AgentEvent] = [
    StartEvent(agent="writer", rollout_id="a"),
    AgentReply(agent="writer", rollout_id="a", text="draft"),
    NumericReward(agent="writer", rollout_id="a", value=0.5),
    CompleteEvent(agent="writer", rollout_id="a"),
    StartEvent(agent="critic", rollout_id="a"),
    ErrorEvent(agent="critic", rollout_id="a"),
    StartEvent(agent="writer", rollout_id="b"),
    NumericReward(agent="writer", rollout_id="b", value=1.0),
    SequenceReward(rollout_id="b", value=0.0, rewards=(NamedReward("exact", 0.0), NamedReward("style", 0.75))),
]


def test_rewards_are_added_up_per_agent() -> None:
    view = by_agent(RUN)
    assert list(view) == ["writer", "critic", None]
    assert [message.text for message in view["writer"].messages] == ["draft"]
    assert (view["writer"].rewards.total, view["writer"].rewards.mean, view["writer"].rewards.final) == (1.5, 0.75, 1.0)
    assert (view["critic"].rewards.mean, view["critic"].rewards.count) == (None, 0)


def test_rewards_are_added_up_per_task() -> None:
    view = by_task(RUN)
    assert view["a"].rewards.values == (0.5,)
    assert (view["b"].rewards.values, view["b"].rewards.totals_by_name) == ((1.0, 0.0), {"exact": 0.0, "style": 0.75})


def test_progress_is_told_per_task() -> None:
    view = by_task(RUN)
    assert view["a"].progress == Progress(started=2, completed=1, failed=1)
    assert (view["a"].progress.fraction, view["b"].progress.fraction, Progress().fraction) == (1.0, 0.0, 0.0)
    assert (view["b"].progress.open, view["a"].agents) == (1, ("writer", "critic"))


def test_call_and_its_work_are_one_tool_call() -> None:
    calls: list[AgentEvent] = [ToolCall(tool="f", call_id="1"), ToolCall(tool="f", call_id="1", result="4")]
    anonymous: list[AgentEvent] = [ToolCall(tool="g"), ToolCall(tool="g")]
    view = by_agent([*calls, *anonymous])[None]
    assert [(call.tool, call.result) for call in view.tool_calls] == [("f", "4"), ("g", None), ("g", None)]
