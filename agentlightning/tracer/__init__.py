"""OBSERVING — running code becomes spans, and spans reach the store."""

from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.otel import OtelTracer

__all__ = [
    "Tracer",
    "OtelTracer",
    "AgentOpsTracer",
    "DummyTracer",
    "get_active_tracer",
    "set_active_tracer",
    "clear_active_tracer",
]
