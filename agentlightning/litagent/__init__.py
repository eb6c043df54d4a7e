"""The user's agent: a class, a decorated function, any program, or several of these with a router before them."""

from agentlightning.litagent.command import CommandAgent
from agentlightning.litagent.decorator import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.litagent import LitAgent, is_v0_1_rollout_api
from agentlightning.litagent.router import AgentRouter, Route
from agentlightning.litagent.scoping import resources_for

__all__ = [
    "AgentRouter",
    "CommandAgent",
    "FunctionalLitAgent",
    "LitAgent",
    "Route",
    "is_v0_1_rollout_api",
    "llm_rollout",
    "prompt_rollout",
    "resources_for",
    "rollout",
]
