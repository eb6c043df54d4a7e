"""Public path of the deprecated HttpTracer, which lives in `agentlightning.legacy`; new code uses `OtelTracer`."""

from agentlightning.legacy.http_tracer import HttpTracer

__all__ = ["HttpTracer"]
