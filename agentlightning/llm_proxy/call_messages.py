"""Requests and answers of model calls as HTTP has them: read, bounded, and shown to callers."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from agentlightning.asgi.bodies import check_values
from agentlightning.asgi.response import Header
from agentlightning.dialects import DIALECTS
from agentlightning.dialects.failures import Failure, read_json
from agentlightning.dialects.translation import UntranslatableRequest
from agentlightning.errors import AgentLightningError, PayloadTooLarge, ProxyError, StoreUnavailable
from agentlightning.llm_proxy.attribution import Headers, Refused
from agentlightning.llm_proxy.backends import BackendError, UnknownModel

MOST_ANSWER_VALUES: Final = 1_000_000
"""Of JSON in one answer."""
MOST_LEVELS: Final = 254
"""Of lists and objects within each other, that orjson can write; it reads some more."""
SPARE_LEVELS: Final = 32
"""Left for what translations and records put around a request."""
SERVER_ERROR: Final = 500
FIRST_ERROR: Final = 400
_PASSED: Final = ("retry-after", "retry-after-ms", "x-request-id", "request-id", "openai-model", "x-should-retry")
_PASSED_TO_BACKENDS: Final = frozenset(name for dialect in DIALECTS.values() for name in dialect.passed_headers)


def read_request(body: bytes) -> dict[str, Any]:
    """The request as an object that names a model; raises `Refused` for what is none."""
    try:
        request = orjson.loads(body)
    except ValueError as error:
        raise Refused(Failure(400, f"The request is not JSON: {error}", "invalid_request_error")) from None
    if not isinstance(request, dict):
        raise Refused(Failure(400, "The request must be a JSON object.", "invalid_request_error"))
    if not isinstance(request.get("model"), str) or not request["model"]:
        raise Refused(Failure(400, "The request names no model.", "invalid_request_error", param="model"))
    most_levels = MOST_LEVELS - SPARE_LEVELS
    if body.count(b"{") + body.count(b"[") > most_levels:
        nested: object = request
        for _ in range(SPARE_LEVELS):
            nested = [nested]
        try:
            orjson.dumps(nested)  # which counts levels far faster than we could
        except orjson.JSONEncodeError:
            message = f"The request has more than {most_levels} lists and objects within each other."
            raise Refused(Failure(400, message, "invalid_request_error")) from None
    return request


def read_answer(body: bytes) -> dict[str, object]:
    """A backend's whole answer; ProxyError for what is none."""
    try:
        check_values(body, MOST_ANSWER_VALUES)
    except PayloadTooLarge:
        raise ProxyError(f"The backend answered with more than {MOST_ANSWER_VALUES} values.") from None
    answer = read_json(body)
    if not isinstance(answer, dict):
        raise ProxyError(f"The backend answered what is not a JSON object: {body[:200]!r}")
    return answer


def request_headers(headers: Headers) -> dict[str, str]:
    """Those of the caller's headers that a backend is sent."""
    return {name.decode(): headers[name].decode("latin-1") for name in _PASSED_TO_BACKENDS if name in headers}


def response_headers(headers: Mapping[str, str]) -> list[Header]:
    """Of a backend's headers, those that mean something to the caller."""
    return [
        (name.encode(), value.encode("utf-8", "surrogateescape"))  # what came from a library may be any text
        for name, value in headers.items()
        if name in _PASSED or name.startswith(("x-ratelimit-", "anthropic-ratelimit-", "openai-processing-"))
    ]


def failure_from(error: Refused | AgentLightningError) -> Failure:
    """What the caller gets for an error on the way to a backend."""
    if isinstance(error, Refused):
        return error.failure
    if isinstance(error, StoreUnavailable):
        return Failure(503, f"The proxy cannot reach its store: {error}", None)
    status = error.http_status if error.http_status != SERVER_ERROR else 502
    if isinstance(error, UnknownModel):
        return Failure(status, str(error), None, "model_not_found", "model")
    if isinstance(error, BackendError):
        return Failure(status, str(error), None, retry_after=error.retry_after_seconds)
    return Failure(status, str(error), None, param=error.field if isinstance(error, UntranslatableRequest) else None)
