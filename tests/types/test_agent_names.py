"""The agent a span names."""

from typing import Any

import pytest

from agentlightning.types.agents import agent_name


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"agent.name": "triage", "executor.id": "other"}, "triage"),
        ({"operation.name": "planner", "agentops.span.kind": "agent"}, "planner"),
        ({"operation.name": "planner", "agentops.span.kind": "task"}, None),
        ({"recipient_agent_type": "critic"}, "critic"),
        ({"langchain.chain.type": "write_query"}, "write_query"),
        ({"executor.id": "writer"}, "writer"),
        ({"text": "hello"}, None),
        (None, None),
    ],
    ids=["agents-sdk", "agentops", "agentops-task", "autogen", "langgraph", "agent-framework", "nobody", "nothing"],
)
def test_agent_is_named_by_the_rules_of_its_framework(attributes: Any, name: str | None) -> None:
    assert agent_name(attributes) == name
