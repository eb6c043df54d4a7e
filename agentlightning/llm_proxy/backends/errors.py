"""What can go wrong between the proxy and its backends, with the HTTP status an agent gets for it.

All are `ProxyError`s, take one message, and pickle with what they carry. Their words name backends and models, never
keys.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from agentlightning.errors import ProxyError

__all__ = [
    "BackendBroken",
    "BackendError",
    "BackendUnavailable",
    "DeadlineExceeded",
    "DialectNotServed",
    "Try",
    "UnknownModel",
    "VersionNotServed",
]


class Try(NamedTuple):
    """One attempt to have a call answered."""

    backend: str
    """Name of the backend."""
    happened: str
    """What came of it, in words."""


class BackendError(ProxyError):
    """A call that no backend answered."""

    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, tries: Sequence[Try] = (), retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.tries = list(tries)
        """Every try of the call, first to last."""
        self.retry_after_seconds = retry_after_seconds
        """When the call may find a backend again, if that is known."""

    @property
    def status(self) -> int:
        """The HTTP status with which the proxy answers."""
        return self.http_status


class UnknownModel(BackendError):
    """No backend serves a model of this name."""

    http_status = 404


class VersionNotServed(BackendError):
    """The model is served, but not in the version of resources the call is pinned to."""

    http_status = 409


class DialectNotServed(BackendError):
    """The backend does not speak the client's dialect, and no translation leads there."""

    http_status = 400


class BackendUnavailable(BackendError):
    """No backend of the model could be reached or would take the call."""

    http_status = 503


class DeadlineExceeded(BackendError):
    """The call's time was over before an answer began."""

    http_status = 504


class BackendBroken(BackendError):
    """An answer that began and did not come to its end."""

    http_status = 502
