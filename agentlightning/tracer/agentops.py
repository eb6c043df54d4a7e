"""Public path of AgentOps' tracer, which lives in `agentlightning.legacy`."""

from agentlightning.legacy.agentops_tracer import AgentOpsTracer, LightningSpanProcessor

__all__ = ["AgentOpsTracer", "LightningSpanProcessor"]
