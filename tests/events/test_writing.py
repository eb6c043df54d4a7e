"""Events become spans, and the same events again."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import InvalidValue
from agentlightning.events import (
    AgentEvent,
    AgentReply,
    BinaryReward,
    CompleteEvent,
    ConfigEvent,
    DataEvent,
    ErrorEvent,
    NamedReward,
    NumericReward,
    SequenceReward,
    StartEvent,
    ToolCall,
    UserMessage,
    attributes_of,
    events_of,
    span_of,
)
from agentlightning.types.rewards import LARGEST_REWARD

numbers = st.floats(-LARGEST_REWARD, LARGEST_REWARD)  # those beyond are read as infinite
texts = st.text(max_size=20)
names = st.text(min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
source = {
    "rollout_id": names,
    "attempt_id": names,
    "sequence_id": st.integers(1, 9),
    "span_id": names,
    "time": st.floats(1, 1e9),
    "agent": names | st.none(),
}


def event(kind: type[AgentEvent], **fields: Any) -> st.SearchStrategy[AgentEvent]:
    return st.builds(kind, **source, **fields)


several = st.lists(st.builds(NamedReward, names, numbers), min_size=1, max_size=4).map(tuple)
any_event = st.one_of(
    event(NumericReward, value=numbers),
    event(BinaryReward, value=st.sampled_from([0.0, 1.0])),
    st.builds(
        lambda one, rewards: replace(one, rewards=rewards, value=rewards[0].value), event(SequenceReward), several
    ),
    event(UserMessage, text=texts, role=st.sampled_from(["user", "system", "tool"]), sender=names),
    event(AgentReply, text=texts, sender=names),
    event(ToolCall, text=texts, sender=names, tool=names, call_id=names | st.none(), result=texts | st.none()),
    event(DataEvent, value=values),
    event(ConfigEvent, value=values | st.binary(max_size=8)),
    event(StartEvent),
    event(CompleteEvent),
    event(ErrorEvent, error_type=names | st.none(), message=texts),
)


@given(any_event)
def test_written_event_is_read_as_the_same(written: AgentEvent) -> None:
    (read,) = events_of(span_of(written))

    expected = replace(written, span_name=read.span_name)
    if isinstance(read, (DataEvent, ConfigEvent)):
        expected = replace(expected, type_name=read.type_name)  # type: ignore[call-arg]
    assert read == expected


def test_reward_is_written_for_every_reader() -> None:
    assert attributes_of(NumericReward(value=0.5)) == {
        "agentlightning.event.kind": "reward.numeric",
        "reward": 0.5,
        "agentlightning.reward.0.name": "primary",
        "agentlightning.reward.0.value": 0.5,
    }


def test_event_without_ids_gets_a_span_id() -> None:
    assert len(span_of(AgentReply(text="hi")).span_id) == 16


def test_object_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidValue, match="is of type set, which JSON cannot hold"):
        attributes_of(DataEvent(value={1, 2}))
