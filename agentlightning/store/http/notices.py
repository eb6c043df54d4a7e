"""The route that hands change notices out to clients without a WebSocket.

`GET /v1/agl/notices` without `after` tells where the log of changes stands; with `after` and `wait` it answers as soon
as there is something behind that cursor, or with nothing when the time is over. A client that asks again with the
cursor it was told misses nothing.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from agentlightning.errors import InvalidQuery
from agentlightning.store.http.codec import notice_fields
from agentlightning.store.http.failures import BadArguments
from agentlightning.store.http.permissions import check_subscription
from agentlightning.store.http.service import StoreService
from agentlightning.store.http.tokens import Scope
from agentlightning.types import Notice, NoticeKind

__all__ = ["NoticesQuery", "read_notices"]

MOST_NOTICES = 1000
"""In one answer; the rest follows with the next."""


class NoticesQuery(TypedDict):
    """What may stand in the query string."""

    kinds: NotRequired[Sequence[NoticeKind]]
    after: NotRequired[int]
    wait: NotRequired[float]


_QUERY = TypeAdapter(NoticesQuery)


async def read_notices(service: StoreService, permitted: Scope, query: Sequence[tuple[str, str]]) -> bytes:
    """The body of the answer: a cursor, and the notices before it."""
    check_subscription(permitted)
    given: dict[str, Any] = {name: value for name, value in query if name != "kinds"}
    if kinds := [value for name, value in query if name == "kinds"]:
        given["kinds"] = kinds
    try:
        asked = _QUERY.validate_python(given)
    except ValidationError as error:
        raise BadArguments(InvalidQuery, error) from error
    subscription: Any = service.store.subscribe(asked.get("kinds"), after=asked.get("after"))
    try:
        notices: list[Notice] = []
        if "after" in asked:
            notices = await service.waiting(_gather(subscription, asked.get("wait", 0.0)))
        return orjson.dumps({"cursor": subscription.cursor, "notices": [notice_fields(n) for n in notices]})
    finally:
        await subscription.aclose()


async def _gather(subscription: AsyncIterator[Notice], wait: float) -> list[Notice]:
    """What there is, waiting for the first one only."""
    notices: list[Notice] = []
    patience = max(wait, 0.0) if math.isfinite(wait) else 0.0
    while len(notices) < MOST_NOTICES:
        following = asyncio.ensure_future(subscription.__anext__())
        await asyncio.wait([following], timeout=_AT_HAND_SECONDS if notices else max(patience, _AT_HAND_SECONDS))
        is_late = not following.done()
        if is_late:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if not following.cancelled():
            notices.append(following.result())
        if is_late:
            break
    return notices


_AT_HAND_SECONDS = 0.005
"""What is not told within this time is not there yet."""
