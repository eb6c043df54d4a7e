"""Whose work a span is: the agent's name, by the attributes in which frameworks write it."""

import re
from collections.abc import Mapping

__all__ = ["agent_name"]

_WRITTEN_PLAINLY = (
    "langchain.chain.type",  # LangGraph
    "executor.id",  # agent-framework
    "crewai.agent.role",  # CrewAI
    "gen_ai.agent.name",  # OpenTelemetry's conventions for agents
)
_AUTOGEN_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""What a team appends to the names of its members where it registers them."""
_WEAVE_AGENT = "agentlightning.operation.input.name"
_WEAVE_CHAIN = "langchain.Chain."


def agent_name(attributes: Mapping[str, object] | None, span_name: str = "") -> str | None:
    """The agent a span names itself; None if it names none, whatever the spans around it say."""
    given = attributes or {}
    if "agent.name" in given:  # OpenAI Agents SDK
        return str(given["agent.name"])
    if given.get("agentops.span.kind") == "agent" and "operation.name" in given:  # AgentOps
        return str(given["operation.name"])
    if "recipient_agent_type" in given:  # AutoGen
        return _AUTOGEN_TEAM_ID.sub("", str(given["recipient_agent_type"]))
    for key in _WRITTEN_PLAINLY:
        if key in given:
            return str(given[key])
    if given.get("type") == "agent" and _WEAVE_AGENT in given:
        return str(given[_WEAVE_AGENT])
    if span_name.startswith(_WEAVE_CHAIN) and "lc_name" in given:
        return str(given["lc_name"])
    return None
