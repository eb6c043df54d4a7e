"""Backends of the LLM proxy: who serves which model, and how a call gets to one of them and back.

model list ──▶ providers ──▶ Backend                       what an entry says
Ask ──▶ Fleet ──▶ routing ──▶ admission ──▶ sending ──▶ Answer
                    ▲             ▲            │
                    └── breaker, health, holds ◀┘          what is learned of a backend, kept in its lane
"""

from agentlightning.llm_proxy.backends.answer import Answer
from agentlightning.llm_proxy.backends.asking import Ask, Outgoing
from agentlightning.llm_proxy.backends.backend import Backend
from agentlightning.llm_proxy.backends.clock import Clock
from agentlightning.llm_proxy.backends.errors import (
    BackendBroken,
    BackendError,
    BackendUnavailable,
    DeadlineExceeded,
    DialectNotServed,
    Try,
    UnknownModel,
    VersionNotServed,
)
from agentlightning.llm_proxy.backends.fleet import Fleet
from agentlightning.llm_proxy.backends.providers import backend_of

__all__ = [
    "Answer",
    "Ask",
    "Backend",
    "BackendBroken",
    "BackendError",
    "BackendUnavailable",
    "Clock",
    "DeadlineExceeded",
    "DialectNotServed",
    "Fleet",
    "Outgoing",
    "Try",
    "UnknownModel",
    "VersionNotServed",
    "backend_of",
]
