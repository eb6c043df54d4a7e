"""OBSERVING — running code becomes spans, and spans reach the store."""

import pkgutil
from typing import TYPE_CHECKING

from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.otel import OtelTracer
from agentlightning.utils.deprecation import missing_name

if TYPE_CHECKING:
    from agentlightning.tracer.agentops import AgentOpsTracer

__all__ = [
    "Tracer",
    "OtelTracer",
    "AgentOpsTracer",
    "DummyTracer",
    "get_active_tracer",
    "set_active_tracer",
    "clear_active_tracer",
]


def __getattr__(name: str) -> object:
    if name == "AgentOpsTracer":  # it lives above this package
        return pkgutil.resolve_name("agentlightning.tracer.agentops:AgentOpsTracer")
    raise missing_name(__name__, name)
