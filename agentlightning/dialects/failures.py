"""Errors of backends, read in whatever shape and whatever words they come; dialects write them for their clients.

Reading never raises: a backend that answers nonsense has failed all the same, and the client deserves to hear of it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from http import HTTPStatus
from typing import Final

import orjson

from agentlightning.dialects.attributes import Thing
from agentlightning.errors import ProxyError
from agentlightning.utils.json_values import JsonMapping, JsonObject

MAX_MESSAGE_CHARACTERS: Final = 2000

ANTHROPIC_STATUSES: Final[Mapping[str, int]] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""By type of an error; some servers that speak as OpenAI does have them too."""
_OPENAI_STATUSES: Final[Mapping[str, int]] = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "invalid_api_key": 401,
    "authentication_error": 401,
    "permission_error": 403,
    "model_not_found": 404,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "server_error": 500,
}
_STATUSES: Final[Mapping[str, int]] = {**ANTHROPIC_STATUSES, **_OPENAI_STATUSES}
_ONLY_ANTHROPIC: Final = ANTHROPIC_STATUSES.keys() - _OPENAI_STATUSES.keys()


@dataclass(frozen=True)
class Failure:
    """Why a call was not answered."""

    status: int
    """The HTTP status; for an error within a stream, the one it would have had before."""
    message: str
    kind: str | None
    """The error's type, in the words of the dialect it was told in; None where it gave none."""
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    """Seconds to wait before another try, where that helps."""


class BackendStreamError(ProxyError):
    """A backend reported an error within a stream; what it said stands in `failure`."""

    http_status = 502

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.message


# ---------------------------------------------------------------------- reading


def failure_of(status: int, body: bytes, *, api: str) -> Failure:
    """What an answer with an error status says to a call of this API."""
    answer = read_json(body)
    error = _error_in(answer)
    message = _message_in(error) or (_text_in(body) if answer is None else "")
    known = {one.value: f" {one.phrase}" for one in HTTPStatus}
    answered = f"The backend answered {status}{known.get(status, '')} to a {api} call"
    return Failure(
        status=status,
        message=message or f"{answered} and did not say why.",
        kind=_word(error.get("type") or error.get("error_type")),
        code=_code_in(error, status),
        param=_word(error.get("param")),
    )


def is_error_event(event: JsonMapping) -> bool:
    """Whether an event of a stream reports an error; some servers send the error as the event, without a key for it."""
    return bool(event.get("error")) or "error" in (event.get("object"), event.get("type"))


def failure_in_stream(data: bytes) -> Failure:
    """What an error event within a stream says; its status is guessed from the error's type and code."""
    error = _error_in(read_json(data))
    kind, code = _word(error.get("type")), _word(error.get("code"))
    if kind == "error":  # the type of the event, not of the error
        kind = None
    status = _STATUSES.get(code or "") or _STATUSES.get(kind or "") or 500
    if code is not None and re.fullmatch("[45][0-9][0-9]", code):  # some backends give the status as the code
        status = int(code)
    message = _message_in(error) or "The backend ended the stream with an error and did not say why."
    return Failure(status, message, kind, _code_in(error, status), _word(error.get("param")))


def read_json(body: bytes | str) -> Thing:
    """The value of a body; None for what is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _error_in(answer: Thing) -> JsonMapping:
    """The object that describes the error; one that a bare text or list becomes, where there is no object."""
    if isinstance(answer, list) and answer:  # some wrap it in a list
        answer = answer[0]
    if not isinstance(answer, dict):
        return {"message": answer}
    error = answer.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, (str, list)) and error:
        return {**answer, "message": error}
    response = answer.get("response")
    if isinstance(response, dict) and isinstance(response.get("error"), dict):  # `response.failed`
        return _error_in(response)
    return answer


def _message_in(error: JsonMapping) -> str:
    for name in ("message", "detail", "msg"):
        value = error.get(name)
        told = "; ".join(filter(None, map(_fault, value if isinstance(value, list) else [value])))
        if told:
            return told[:MAX_MESSAGE_CHARACTERS]
    return ""


def _fault(value: object) -> str:
    """One thing that is wrong: a text, or the object that FastAPI makes of it."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, dict):
        return ""
    told = value.get("msg") or value.get("message")
    if not isinstance(told, str):
        return ""
    place = value.get("loc")
    return f"{'.'.join(map(str, place))}: {told}" if isinstance(place, list) and place else told


def _text_in(body: bytes) -> str:
    """What a body that is not JSON says: the title of a page, or the text itself."""
    text = body.decode(errors="replace").strip()
    if not text.startswith("<"):
        return text[:MAX_MESSAGE_CHARACTERS]
    _, _, titled = text.partition("<title>")
    return unescape(titled.partition("</title>")[0].strip())[:MAX_MESSAGE_CHARACTERS]


def _word(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    return str(value) or None


def _code_in(error: JsonMapping, status: int) -> str | None:
    """The error's code; vLLM and others repeat the status there, which says nothing new."""
    code = _word(error.get("code"))
    return None if code == str(status) else code


# ---------------------------------------------------------------------- writing


def openai_error(failure: Failure) -> JsonObject:
    """The error as OpenAI's APIs have it."""
    kind = failure.kind
    if kind is None or kind in _ONLY_ANTHROPIC:
        otherwise = "invalid_request_error" if 400 <= failure.status < 500 else "server_error"
        kind = {403: "permission_error", 429: "rate_limit_error"}.get(failure.status, otherwise)
    code = failure.code or {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(failure.status)
    return {"message": failure.message, "type": kind, "param": failure.param, "code": code}


def dumped(value: JsonMapping) -> bytes:
    """The JSON of an answer that says what others have written."""
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair in a message, which is not text
        return orjson.dumps(_mended(value))


def _mended(value: object) -> Thing:
    if isinstance(value, Mapping):
        return {name: _mended(entry) for name, entry in value.items()}
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
