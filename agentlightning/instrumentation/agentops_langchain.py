"""Public path of the instrumentation of AgentOps' handler for LangChain, which lives in `agentlightning.legacy`."""

from agentlightning.legacy.agentops_patches import instrument_agentops_langchain, uninstrument_agentops_langchain

__all__ = ["instrument_agentops_langchain", "uninstrument_agentops_langchain"]
