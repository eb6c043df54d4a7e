"""Every exception Agent Lightning raises, as one tree.

Each class also inherits the builtin it refines, so user code that catches `ValueError` or `ConnectionError` keeps
working, and carries the HTTP status with which a server answers it. All take one message and pickle.

    AgentLightningError
    ├── ConfigurationError (ValueError)      a part cannot be built as asked
    ├── StoreError
    │   ├── NotFound (ValueError)            404  the id names nothing
    │   ├── InvalidTransition (ValueError)   409  the state does not allow this
    │   ├── InvalidQuery (ValueError)        400  a filter, sort key or page that cannot be answered
    │   ├── InvalidValue (ValueError)        400  a value the store cannot keep faithfully
    │   ├── RequestConflict (ValueError)     409  one request id, two different requests
    │   ├── PayloadTooLarge (ValueError)     413  above the size limit
    │   ├── QuotaExceeded (ValueError)       413  the attempt has written as much as it may
    │   ├── NotAllowed (PermissionError)     403  the caller's token does not permit this
    │   │   └── InvalidToken                 401  no token, or one that is wrong or has expired
    │   ├── SpansEvicted (RuntimeError)      410  the spans were dropped to save memory
    │   └── StoreUnavailable (ConnectionError) 503  the store cannot be reached, or cannot write
    │       └── IncompatibleStore            503  the file is corrupt, foreign, or from a newer release
    ├── RolloutFailed (RuntimeError)
    │   ├── AttemptTimedOut (TimeoutError)
    │   └── WorkerLost
    ├── TracingError (RuntimeError)
    │   └── NoActiveTracer
    ├── ProxyError (RuntimeError)
    ├── EngineError (RuntimeError)
    │   └── InvalidRequest (ValueError)      400  the engine cannot do what it is asked to
    ├── TrainingError (RuntimeError)
    │   └── RunnersKilled
    └── TemplateError (RuntimeError)         a prompt template cannot be filled
        └── TemplateNotAllowed (PermissionError)  it would run or reach what templates may not
"""

from typing import ClassVar

__all__ = [
    "AgentLightningError",
    "ConfigurationError",
    "StoreError",
    "NotFound",
    "InvalidTransition",
    "InvalidQuery",
    "InvalidValue",
    "RequestConflict",
    "PayloadTooLarge",
    "QuotaExceeded",
    "NotAllowed",
    "InvalidToken",
    "SpansEvicted",
    "StoreUnavailable",
    "IncompatibleStore",
    "RolloutFailed",
    "AttemptTimedOut",
    "WorkerLost",
    "TracingError",
    "NoActiveTracer",
    "ProxyError",
    "EngineError",
    "InvalidRequest",
    "TrainingError",
    "RunnersKilled",
    "TemplateError",
    "TemplateNotAllowed",
]


class AgentLightningError(Exception):
    """Base of everything we raise on purpose."""

    http_status: ClassVar[int] = 500


class ConfigurationError(AgentLightningError, ValueError):
    """A part cannot be built as asked; the message names the argument and the accepted forms."""

    http_status = 400


class StoreError(AgentLightningError):
    """A store operation did not take effect."""


class NotFound(StoreError, ValueError):
    """The id names nothing in this store."""

    http_status = 404


class InvalidTransition(StoreError, ValueError):
    """The current state does not allow the requested change."""

    http_status = 409


class InvalidQuery(StoreError, ValueError):
    """A filter, sort key or page that cannot be answered."""

    http_status = 400


class InvalidValue(StoreError, ValueError):
    """A value the store could not give back as it was received (NaN, lone surrogates, an object JSON cannot hold)."""

    http_status = 400


class RequestConflict(StoreError, ValueError):
    """An id was used again for a different operation or with different content."""

    http_status = 409


class PayloadTooLarge(StoreError, ValueError):
    """A span or request above the size limit."""

    http_status = 413


class QuotaExceeded(StoreError, ValueError):
    """An attempt has written as many spans, or as many bytes of them, as the store keeps of one attempt."""

    http_status = 413


class NotAllowed(StoreError, PermissionError):
    """The caller's token does not permit this operation."""

    http_status = 403


class InvalidToken(NotAllowed):
    """The caller showed no token, or one that is wrong or has expired."""

    http_status = 401


class SpansEvicted(StoreError, RuntimeError):
    """The rollout's spans were dropped to keep the memory store within its threshold."""

    http_status = 410


class StoreUnavailable(StoreError, ConnectionError):
    """The store cannot be reached or cannot write; never a disguise for "not found"."""

    http_status = 503


class IncompatibleStore(StoreUnavailable):
    """A store file that is corrupt, belongs to another program, or was written by a newer release."""


class RolloutFailed(AgentLightningError, RuntimeError):
    """A rollout ended without success where success was needed."""


class AttemptTimedOut(RolloutFailed, TimeoutError):
    """The agent took longer than it was allowed."""


class WorkerLost(RolloutFailed):
    """The worker ended before the agent did, which is not the fault of the task."""


class TracingError(AgentLightningError, RuntimeError):
    """Observation could not be set up or delivered."""


class NoActiveTracer(TracingError):
    """Something was emitted while no tracer was listening."""


class ProxyError(AgentLightningError, RuntimeError):
    """The model's door could not serve a call."""


class EngineError(AgentLightningError, RuntimeError):
    """The embedded model could not serve a call."""


class InvalidRequest(EngineError, ValueError):
    """The caller asked the engine for something it cannot do; nothing is wrong with the engine."""

    http_status = 400


class TrainingError(AgentLightningError, RuntimeError):
    """A learning step could not be made."""


class RunnersKilled(TrainingError):
    """Runner processes were ended by a signal."""

    rollout_ids: tuple[str, ...] = ()
    """What they were working on, all of which was given back."""


class TemplateError(AgentLightningError, RuntimeError):
    """A prompt template cannot be filled."""


class TemplateNotAllowed(TemplateError, PermissionError):
    """A prompt template would run code, or reach something, that templates may not here."""
