"""Exceptions on the wire: an error of ours travels as its class, any other as a status and a text.

The server never sends a traceback; it logs one for what it did not expect. A client raises what the store raised:
errors of `agentlightning.errors` by name, and for everything else an `aiohttp.ClientResponseError` that carries
`detail` and `error_type`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import yarl
from multidict import CIMultiDict, CIMultiDictProxy
from pydantic import ValidationError

from agentlightning import errors
from agentlightning.asgi.response import Header, Response, json_response
from agentlightning.errors import AgentLightningError

__all__ = ["BadArguments", "Failure", "RemoteError", "exception_of", "failure_of"]

logger = logging.getLogger(__name__)

BAD_REQUEST = 400
UNPROCESSABLE = 422

_OWN_ERRORS: Mapping[str, type[AgentLightningError]] = {name: getattr(errors, name) for name in errors.__all__}


@dataclass(frozen=True)
class Failure:
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

    detail: Any = None
    error_type: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        request = self.request_info
        return _remote_error, (self.status, self.error_type, self.detail, request.method, str(request.real_url))


def failure_of(error: BaseException) -> Failure:
    """How an exception is told; what nobody expected is also logged."""
    if isinstance(error, AgentLightningError):
        return Failure(error.http_status, type(error).__name__, str(error))
    if isinstance(error, BadArguments):
        return Failure(UNPROCESSABLE, error.error_type.__name__, _complaints(error.complaint))
    logger.error("A store operation failed unexpectedly.", exc_info=error)
    return Failure(BAD_REQUEST, type(error).__name__, str(error))


def exception_of(failure: Failure, request: aiohttp.RequestInfo) -> Exception:
    """The exception a client raises for what it was told."""
    own = _OWN_ERRORS.get(failure.error_type)
    if own is not None:
        return own(_sentence(failure.detail))
    return _remote_error(failure.status, failure.error_type, failure.detail, request.method, str(request.real_url))


def _remote_error(status: int, error_type: str, detail: Any, method: str, url: str) -> RemoteError:
    without_headers = CIMultiDictProxy[str](CIMultiDict())  # which would show the token
    request = aiohttp.RequestInfo(yarl.URL(url), method, without_headers, yarl.URL(url))
    error = RemoteError(request, (), status=status, message=f"{error_type}: {detail}")
    error.detail, error.error_type = detail, error_type
    return error


def _complaints(error: ValidationError) -> list[dict[str, Any]]:
    return [
        {"type": complaint["type"], "loc": list(complaint["loc"]), "msg": complaint["msg"]}
        for complaint in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def _sentence(detail: Any) -> str:
    """What is wrong, as one text."""
    if not isinstance(detail, list):
        return str(detail)
    complaints = [complaint for complaint in detail if isinstance(complaint, dict)]
    return "; ".join(f"{'.'.join(map(str, c.get('loc', ())))}: {c.get('msg')}" for c in complaints) + "."
