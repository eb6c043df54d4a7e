"""Public path of AgentOps' tracer, which lives in `agentlightning.legacy`."""

from agentlightning.legacy.agentops import AgentOpsTracer, LightningSpanProcessor

__all__ = ["AgentOpsTracer", "LightningSpanProcessor"]
