"""What a request is recognised by when it comes again under its id: operation, arguments and caller.

Answers are kept with a digest of these, so that an id that somebody uses again for something else is a conflict, and
not a silent answer to another question.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import orjson
from pydantic import BaseModel

from agentlightning.errors import InvalidValue, RequestConflict
from agentlightning.types import Span

__all__ = ["MOST_ID_CHARACTERS", "check_request_id", "check_same_request", "described_request"]

MOST_ID_CHARACTERS: Final = 256
_DIGEST_BYTES: Final = 16
_ORDERED: Final = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
_OF_ONE_TRY: Final = ("wait", "limit", "known_resources")
"""Arguments of claims that a client may change when it asks again for a claim whose answer was lost."""


def check_request_id(request_id: str) -> None:
    """Refuse an id that is too long to be kept."""
    if len(request_id) > MOST_ID_CHARACTERS:
        raise InvalidValue(
            f"The request id '{request_id[:20]}…' has {len(request_id)} characters; use at most {MOST_ID_CHARACTERS}."
        )


def described_request(name: str, arguments: Mapping[str, Any], caller: str) -> str:
    """The operation and, behind a blank, the digest of what it is called with and by whom."""
    given = {
        key: _identity(value)
        for key, value in arguments.items()
        if value is not None and key not in _OF_ONE_TRY  # routes send no None, the live channel does
    }
    try:
        encoded = orjson.dumps([caller, given], default=_plain, option=_ORDERED)
    except orjson.JSONEncodeError:  # such as an integer above 64 bits, which only a call in process can have
        encoded = repr([caller, sorted(given.items())]).encode("utf-8", "backslashreplace")
    return f"{name} {hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()}"


def check_same_request(request_id: str, before: str, now: str) -> None:
    """Refuse an id that was used for another request; both as `described_request` has them."""
    (operation, _, digest), (name, _, _) = before.partition(" "), now.partition(" ")
    if operation != name:
        what = f"{operation} and now for {name}"
    elif digest and before != now:  # answers in files of before have no digest
        what = f"another {name}, with other arguments or another token"
    else:
        return
    raise RequestConflict(f"Request id '{request_id}' was used for {what}; give every request an id of its own.")


def _identity(value: Any) -> Any:
    """A value, or of a batch of spans their ids: a store keeps one span of an id, and batches are large."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Span):
        return [(span.rollout_id, span.attempt_id, span.span_id, span.name) for span in value if isinstance(span, Span)]
    return value


def _plain(value: Any) -> Any:
    """What is not JSON by itself, as something that is."""
    return value.__dict__ if isinstance(value, BaseModel) else repr(value)
