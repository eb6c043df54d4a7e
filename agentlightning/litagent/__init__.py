"""The user's agent: a class, a decorated function, any program, or several of these with a router before them."""

from agentlightning.instrumentation.redirect import exclude_from_redirect, not_redirected
from agentlightning.litagent.command import CommandAgent
from agentlightning.litagent.decorator import FunctionalLitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.invocation import AgentRouter, Route
from agentlightning.litagent.litagent import LitAgent, is_v0_1_rollout_api
from agentlightning.types.resources import resources_for

__all__ = [
    "AgentRouter",
    "CommandAgent",
    "FunctionalLitAgent",
    "LitAgent",
    "Route",
    "exclude_from_redirect",
    "is_v0_1_rollout_api",
    "llm_rollout",
    "not_redirected",
    "prompt_rollout",
    "resources_for",
    "rollout",
]
