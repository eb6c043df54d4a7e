"""Whether and when a call is tried again: rules over statuses, headers and the number of the try."""

import email.utils
import math
import random
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Final

__all__ = ["backoff_seconds", "is_passing", "wished_hold_seconds"]

FIRST_BACKOFF_SECONDS: Final = 0.5
LONGEST_BACKOFF_SECONDS: Final = 8.0
LONGEST_HOLD_SECONDS: Final = 3600.0
"""No backend is left alone for longer, whatever it wishes."""
_PASSING: Final = frozenset({408, 409, 429})
_SERVER_ERRORS: Final = 500
_OVERLOADED: Final = frozenset({429, 503, 529})


def is_passing(status: int, headers: Mapping[str, str]) -> bool:
    """Whether the same call may be answered better a little later."""
    wish = headers.get("x-should-retry")
    if wish in ("true", "false"):
        return wish == "true" and status >= 400
    return status in _PASSING or status >= _SERVER_ERRORS


def backoff_seconds(number: int, chance: random.Random) -> float:
    """The pause before going back to a backend; `number` counts the pauses of the call from 0."""
    longest = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(number, 16), LONGEST_BACKOFF_SECONDS)
    return longest * (0.5 + 0.5 * chance.random())


def wished_hold_seconds(status: int, headers: Mapping[str, str]) -> float:
    """How long an overloaded backend asks to be left alone; 0 if it does not say."""
    if status not in _OVERLOADED:
        return 0.0
    seconds = _number(headers.get("retry-after-ms"), 0.001)
    if seconds is None:
        seconds = _number(headers.get("retry-after"), 1.0)
    if seconds is None:
        seconds = _until(headers.get("retry-after"))
    return min(max(seconds, 0.0), LONGEST_HOLD_SECONDS)


def _number(text: str | None, unit: float) -> float | None:
    try:
        seconds = float(text or "") * unit
    except ValueError:
        return None
    return None if math.isnan(seconds) else seconds


def _until(text: str | None) -> float:
    """Seconds until an HTTP date; 0 for what is none."""
    try:
        moment = email.utils.parsedate_to_datetime(text or "")
    except (TypeError, ValueError):
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - datetime.now(timezone.utc)).total_seconds()
