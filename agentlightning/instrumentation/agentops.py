"""Public path of AgentOps' instrumentation, which lives in `agentlightning.legacy`."""

from agentlightning.legacy.agentops import enable_agentops_service, instrument_agentops, uninstrument_agentops
from agentlightning.legacy.agentops_service import AgentOpsServerManager, agentops_local_server

__all__ = [
    "AgentOpsServerManager",
    "agentops_local_server",
    "enable_agentops_service",
    "instrument_agentops",
    "uninstrument_agentops",
]
