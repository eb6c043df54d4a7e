"""The options of adapters, at the path where users import them from."""

from agentlightning.engine.model import LoraOptions

__all__ = ["LoraOptions"]
