"""Rewards are read off spans in every format there is."""

import json
from typing import Any

import pytest

from agentlightning.adapter.tree import TraceTree
from agentlightning.types.rewards import (
    final_reward_of,
    is_reward_scope,
    is_reward_span,
    reward_payload_of,
    reward_value_of,
)
from tests.adapter.spans import REWARD, reward, span

PAYLOAD = {"type": "reward", "value": 0.5}


@pytest.mark.parametrize(
    ("name", "attributes", "value"),
    [
        pytest.param(REWARD, {"reward": 1}, 1.0, id="plain"),
        pytest.param(REWARD, {}, None, id="plain-without-value"),
        pytest.param("task", {"reward": 1.0}, None, id="attribute-on-another-span"),
        pytest.param("task", {"agentops.task.output": json.dumps(PAYLOAD)}, 0.5, id="agentops-task"),
        pytest.param("task", {"agentops.entity.output": json.dumps(PAYLOAD)}, 0.5, id="agentops-entity"),
        pytest.param("task", {"agentops.task.output": '{"type": "reward", "value": null}'}, None, id="agentops-none"),
        pytest.param("task", {"agentops.task.output": '{"answer": 4}'}, None, id="agentops-no-reward"),
        pytest.param("task", {"agentops.task.output": "done"}, None, id="agentops-text"),
        pytest.param("note", {"agentlightning.reward.0.name": "x", "agentlightning.reward.0.value": 2}, 2.0, id="new"),
        pytest.param(REWARD, {"agentlightning.reward.0.value": 2.0, "reward": 1.0}, 2.0, id="new-before-plain"),
    ],
)
def test_reward_of_a_span(name: str, attributes: dict[str, Any], value: float | None) -> None:
    judged = span("a", name=name, attributes=attributes)

    assert reward_value_of(judged) == value
    assert is_reward_span(judged) == (value is not None)


def test_a_span_without_attributes_has_no_reward() -> None:
    class Bare:
        name = REWARD
        attributes = None

    assert reward_payload_of(Bare()) == {}


def test_final_reward_is_the_last_that_is_a_number() -> None:
    spans = [reward("a", None, 1.0, at=0.0), reward("b", None, 2.0, at=1.0), reward("c", None, None, at=2.0)]

    assert final_reward_of(spans) == 2.0
    assert final_reward_of([]) is None


def test_a_reward_without_value_is_still_a_reward_in_the_tree() -> None:
    attributes = {"agentops.task.output": '{"type": "reward", "value": null}'}
    node = TraceTree("a", span("a", attributes=attributes))

    assert node.is_reward_span()
    assert node.maybe_reward_dict() == {"type": "reward", "value": None}


def test_an_operation_that_makes_a_reward_is_its_scope() -> None:
    attributes = {"agentlightning.operation.name": REWARD}

    assert is_reward_scope(span("a", name="agentlightning.operation", attributes=attributes))
    assert not is_reward_scope(span("a", name="agentlightning.operation", attributes={}))
