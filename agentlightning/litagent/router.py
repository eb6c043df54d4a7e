"""Routers of agents, at the path where users import them from."""

from agentlightning.litagent.invocation import AgentRouter, Predicate

__all__ = ["AgentRouter", "Predicate"]
