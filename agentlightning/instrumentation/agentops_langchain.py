"""Public path of the instrumentation of AgentOps' handler for LangChain: what it writes is recorded with the rest."""

from agentlightning.legacy.agentops import instrument_agentops as instrument_agentops_langchain
from agentlightning.legacy.agentops import uninstrument_agentops as uninstrument_agentops_langchain

__all__ = ["instrument_agentops_langchain", "uninstrument_agentops_langchain"]
