"""Whose work a span is: the agent's name, by the attributes in which frameworks write it."""

from collections.abc import Mapping

__all__ = ["agent_name"]

_AGENT_SPAN_KIND = "agent"


def agent_name(attributes: Mapping[str, object] | None) -> str | None:
    """The agent a span names itself; None if it names none, whatever the spans around it say."""
    given = attributes or {}
    is_agent = given.get("agentops.span.kind") == _AGENT_SPAN_KIND
    candidates = (
        given.get("agent.name"),  # OpenAI Agents SDK
        given.get("operation.name") if is_agent else None,  # AgentOps
        given.get("recipient_agent_type"),  # AutoGen
        given.get("langchain.chain.type"),  # LangGraph
        given.get("executor.id"),  # agent-framework
    )
    return next((str(name) for name in candidates if name is not None), None)
