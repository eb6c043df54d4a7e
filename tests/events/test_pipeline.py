"""Filters and transformers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigurationError
from agentlightning.events import (
    AgentEvent,
    AgentReply,
    BinaryReward,
    ErrorEvent,
    NumericReward,
    StartEvent,
    UserMessage,
    mapped,
    of_agent,
    of_kind,
    of_rollout,
    pipeline,
    where,
)

EVENTS: list[AgentEvent] = [
    StartEvent(agent="critic-1", rollout_id="a"),
    AgentReply(text="hi", agent="critic-1", rollout_id="a"),
    NumericReward(value=0.5, agent="critic-2", rollout_id="b"),
    BinaryReward(value=1.0, rollout_id="b"),
    ErrorEvent(agent="writer", rollout_id="b"),
]


@pytest.mark.parametrize(
    ("kinds", "places"),
    [(("reward",), [2, 3]), (("reward.binary",), [3]), (("state", "message.reply"), [0, 1, 4]), ((), [])],
    ids=["family", "member", "several", "none"],
)
def test_kinds_are_kept_by_family_or_member(kinds: tuple[str, ...], places: list[int]) -> None:
    assert list(of_kind(*kinds)(EVENTS)) == [EVENTS[place] for place in places]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no events of kind"):
        of_kind("weather")


def test_agents_are_kept_by_pattern() -> None:
    assert list(of_agent("critic-*")(EVENTS)) == EVENTS[:3]


def test_steps_are_taken_in_order() -> None:
    shout = mapped(lambda event: replace(event, text="HI") if isinstance(event, AgentReply) else None)
    flow = pipeline(of_rollout("a"), shout, where(lambda event: isinstance(event, AgentReply)))

    (event,) = flow(EVENTS)

    assert isinstance(event, AgentReply)
    assert event.text == "HI"


@given(st.lists(st.sampled_from([*EVENTS, UserMessage()])), st.integers(0, 5))
def test_stream_in_pieces_gives_what_the_whole_gives(events: list[AgentEvent], cut: int) -> None:
    flow = pipeline(of_kind("message", "reward"), of_agent("critic-*"))
    assert [*flow(events[:cut]), *flow(events[cut:])] == list(flow(events))
