"""Answers kept for requests that come twice, for stores that do not keep them themselves.

The stores of this package keep answers in the transaction that made them. For any other store the server remembers them
in its own memory: enough for a lost reply, not for a restart.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from agentlightning.errors import RequestConflict
from agentlightning.store.base import LightningStore
from agentlightning.store.forwarding import LightningStoreThreaded
from agentlightning.store.local import ANSWER_LIFETIME_SECONDS, LocalStore

__all__ = ["Perform", "remembering"]

MOST_ANSWERS = 10_000


class Perform(Protocol):
    """`LightningStore.perform`, or something like it."""

    def __call__(self, name: str, arguments: Mapping[str, Any], *, request_id: str | None = None) -> Awaitable[Any]: ...


def remembering(store: LightningStore) -> Perform:
    """How to perform operations on a store such that a repeated request acts once."""
    inner = store.store if isinstance(store, LightningStoreThreaded) else store
    return store.perform if isinstance(inner, LocalStore) else _Memory(store).perform


class _Memory:
    """The answers of one store, while they are made and for a while after."""

    def __init__(self, store: LightningStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._answers: OrderedDict[str, tuple[float, str, asyncio.Future[Any]]] = OrderedDict()

    async def perform(self, name: str, arguments: Mapping[str, Any], *, request_id: str | None = None) -> Any:
        if request_id is None:
            return await self._store.perform(name, arguments)
        self._expire()
        known = self._answers.get(request_id)
        if known is not None and known[1] != name:
            raise RequestConflict(f"Request id '{request_id}' was used for {known[1]} and now for {name}.")
        if known is not None:
            return await asyncio.shield(known[2])
        future = asyncio.ensure_future(self._store.perform(name, arguments))
        self._answers[request_id] = (self._clock(), name, future)
        try:
            result = await future
        except BaseException:
            self._answers.pop(request_id, None)
            raise
        if result is None or result == []:
            self._answers.pop(request_id, None)
        return result

    def _expire(self) -> None:
        oldest = self._clock() - ANSWER_LIFETIME_SECONDS
        while self._answers and (len(self._answers) > MOST_ANSWERS or next(iter(self._answers.values()))[0] < oldest):
            self._answers.popitem(last=False)
