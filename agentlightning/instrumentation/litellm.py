"""Public path of the switches for the spans that LiteLLM exports."""

from agentlightning.instrumentation.frameworks.litellm import instrument_litellm, uninstrument_litellm

__all__ = ["instrument_litellm", "uninstrument_litellm"]
