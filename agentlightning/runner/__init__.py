"""Runners: they claim rollouts, run agents on them, and report."""

import pkgutil

from agentlightning.runner.agent import LitAgentRunner
from agentlightning.runner.base import Runner

__all__ = ["LitAgentRunner", "Runner"]


def __getattr__(name: str) -> object:
    if name == "LegacyAgentRunner":  # a door, opened on first touch
        return pkgutil.resolve_name("agentlightning.legacy.runner:LegacyAgentRunner")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
