"""Backends of the LLM proxy: who serves which model, and how a call gets to one of them and back.

model list ──▶ model_entry ──▶ Backend                                         what an entry says
BackendCall ──▶ BackendPool ──▶ HttpSender ──▶ BackendResponse
                       └── BackendState: breaker, limits, queue                what is remembered of a backend
"""

from agentlightning.llm_proxy.backends.backend import (
    Backend,
    BackendBroken,
    BackendError,
    BackendUnavailable,
    DeadlineExceeded,
    DialectNotServed,
    Try,
    UnknownModel,
    VersionNotServed,
    backend_of,
)
from agentlightning.llm_proxy.backends.backend_call import BackendCall, PreparedRequest
from agentlightning.llm_proxy.backends.backend_pool import DEFAULT_DEADLINE_SECONDS, BackendPool
from agentlightning.llm_proxy.backends.backend_state import Clock
from agentlightning.llm_proxy.backends.connection import BackendResponse

__all__ = [
    "DEFAULT_DEADLINE_SECONDS",
    "Backend",
    "BackendBroken",
    "BackendError",
    "BackendCall",
    "BackendPool",
    "BackendResponse",
    "BackendUnavailable",
    "Clock",
    "DeadlineExceeded",
    "DialectNotServed",
    "PreparedRequest",
    "Try",
    "UnknownModel",
    "VersionNotServed",
    "backend_of",
]
