"""Door to the OpenTelemetry tracer that emitters write with."""

from agentlightning.utils.otel import get_tracer

__all__ = ["get_tracer"]
