"""Public path of what records W&B Weave."""

from agentlightning.instrumentation.frameworks.weave import WeavePatch, weave_management

__all__ = ["WeavePatch", "weave_management"]
