"""Exceptions on the wire: an error of ours travels as its class, any other as a status and a text.

The server never sends a traceback; it logs one for what it did not expect. A client raises what the store raised:
errors of `agentlightning.errors` by name, and for everything else an `aiohttp.ClientResponseError` that carries
`detail` and `error_type`. Here is also which failures pass, so that a client makes the call again.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import yarl
from multidict import CIMultiDict, CIMultiDictProxy
from pydantic import ValidationError

from agentlightning import errors
from agentlightning.asgi.response import Header, Response, json_response
from agentlightning.errors import AgentLightningError, IncompatibleStore, InvalidValue, StoreUnavailable

logger = logging.getLogger(__name__)

_BAD_REQUEST, _REQUEST_TIMEOUT, _UNPROCESSABLE, _SERVER_ERRORS = 400, 408, 422, 500
_WAITED_SECONDS = 0.1
"""A call that reached the server and lasted longer than this had begun to wait there."""


@dataclass(frozen=True)
class FailureReply:
    """What a client is told of an exception."""

    status: int
    error_type: str
    detail: Any

    def response(self, headers: Sequence[Header] = ()) -> Response:
        return json_response({"detail": self.detail, "error_type": self.error_type}, self.status, headers)


class BadArguments(Exception):
    """Arguments that do not fit their operation; told to the client, never raised to a user."""

    def __init__(self, error_type: type[AgentLightningError], complaint: ValidationError) -> None:
        super().__init__(str(complaint))
        self.error_type = error_type
        self.complaint = complaint


class RemoteError(aiohttp.ClientResponseError):
    """An exception on the server that is none of ours."""

    def __init__(self, failure: FailureReply, method: str, url: str) -> None:
        without_headers = CIMultiDictProxy[str](CIMultiDict())  # which would show the token
        request = aiohttp.RequestInfo(yarl.URL(url), method, without_headers, yarl.URL(url))
        super().__init__(request, (), status=failure.status, message=f"{failure.error_type}: {failure.detail}")
        self.failure = failure

    @property
    def detail(self) -> Any:
        return self.failure.detail

    @property
    def error_type(self) -> str:
        return self.failure.error_type

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteError, (self.failure, self.request_info.method, str(self.request_info.real_url))


def failure_of(error: BaseException) -> FailureReply:
    """How an exception is told; what nobody expected is also logged."""
    if isinstance(error, RecursionError):
        error = InvalidValue("A value of this request is nested too deeply; give a flatter one.")
    if isinstance(error, AgentLightningError):
        return FailureReply(error.http_status, type(error).__name__, str(error))
    if isinstance(error, BadArguments):
        found = error.complaint.errors(include_url=False, include_context=False, include_input=False)
        detail = [{"type": each["type"], "loc": list(each["loc"]), "msg": each["msg"]} for each in found]
        return FailureReply(_UNPROCESSABLE, error.error_type.__name__, detail)
    logger.error("A store operation failed unexpectedly.", exc_info=error)
    return FailureReply(_BAD_REQUEST, type(error).__name__, str(error))


def exception_of(failure: FailureReply, method: str, url: str) -> Exception:
    """The exception a client raises for what it was told."""
    if failure.error_type not in errors.__all__:
        return RemoteError(failure, method, url)
    own: type[AgentLightningError] = getattr(errors, failure.error_type)
    if not isinstance(failure.detail, list):
        return own(str(failure.detail))
    complaints = [complaint for complaint in failure.detail if isinstance(complaint, dict)]
    return own("; ".join(f"{'.'.join(map(str, c.get('loc', ())))}: {c.get('msg')}" for c in complaints) + ".")


# ---------------------------------------------------------------------- failures that pass


class ConnectionLost(ConnectionError):
    """No answer came, or none that can be read; raised for the retry loop, never to a user."""


_PASSING = (
    aiohttp.ServerDisconnectedError,
    aiohttp.ClientOSError,
    aiohttp.ClientPayloadError,
    asyncio.TimeoutError,
    ConnectionLost,
    StoreUnavailable,
)


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status == _REQUEST_TIMEOUT or error.status >= _SERVER_ERRORS
    return isinstance(error, _PASSING) and not isinstance(error, IncompatibleStore)


def is_outage(error: Exception) -> bool:
    """Whether nobody answered, as opposed to a server that is in trouble."""
    return not isinstance(error, (StoreUnavailable, aiohttp.ClientResponseError))


def has_waited(error: Exception, seconds: float) -> bool:
    """Whether a call that waits had arrived, and waited for a while."""
    return seconds > _WAITED_SECONDS and not isinstance(error, (aiohttp.ClientConnectorError, asyncio.TimeoutError))


def given_up(error: Exception) -> Exception:
    """The exception for the user of a client whose patience has ended."""
    if isinstance(error, StoreUnavailable):
        return StoreUnavailable(str(error))
    if isinstance(error, aiohttp.ClientResponseError):
        return aiohttp.ClientResponseError(error.request_info, (), status=error.status, message=error.message)
    return StoreUnavailable(f"The store does not answer ({type(error).__name__}: {error}); is the server running?")
