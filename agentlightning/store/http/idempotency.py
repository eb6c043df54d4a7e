"""Answers kept for requests that come twice, for stores that do not keep them themselves.

The stores of this package keep answers in the transaction that made them. For any other store the server remembers them
in its own memory: enough for a lost reply, not for a restart.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentlightning.store.base import LightningStore
from agentlightning.store.forwarding import LightningStoreThreaded
from agentlightning.store.local import ANSWER_LIFETIME_SECONDS, LocalStore
from agentlightning.store.request_ids import check_request_id, check_same_request, described_request

__all__ = ["Perform", "remembering"]

MOST_ANSWERS = 10_000


class Perform(Protocol):
    """`LightningStore.perform`, or something like it."""

    def __call__(
        self, name: str, arguments: Mapping[str, Any], *, request_id: str | None = None, caller: str = ""
    ) -> Awaitable[Any]: ...


def remembering(store: LightningStore) -> Perform:
    """How to perform operations on a store such that a repeated request acts once."""
    inner = store.store if isinstance(store, LightningStoreThreaded) else store
    if not isinstance(inner, LocalStore):
        return _Memory(store).perform
    if type(inner).perform is LocalStore.perform:
        return inner.perform

    def perform(
        name: str, arguments: Mapping[str, Any], *, request_id: str | None = None, caller: str = ""
    ) -> Awaitable[Any]:
        """A user's own `perform`, as `LightningStore` declares it, knows no caller."""
        return inner.perform(name, arguments, request_id=request_id)

    return perform


@dataclass
class _Answer:
    """What a request was, or will be, answered."""

    time: float
    request: str
    task: "asyncio.Task[Any]"
    askers: int = 0


class _Memory:
    """The answers of one store, while they are made and for a while after."""

    def __init__(self, store: LightningStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._answers: OrderedDict[str, _Answer] = OrderedDict()

    async def perform(
        self, name: str, arguments: Mapping[str, Any], *, request_id: str | None = None, caller: str = ""
    ) -> Any:
        if name == "forget_requests":
            return self._forget(arguments["request_ids"])
        if name == "abandon_request":
            return False  # only the store itself could give a claim back
        if request_id is None:
            return await self._store.perform(name, arguments)
        check_request_id(request_id)
        request = described_request(name, arguments, caller)
        self._expire()
        answer = self._answers.get(request_id)
        if answer is None:
            task = asyncio.create_task(self._make(name, arguments, request_id))
            answer = self._answers[request_id] = _Answer(self._clock(), request, task)
        else:
            check_same_request(request_id, answer.request, request)
        return await self._told(answer)

    async def _make(self, name: str, arguments: Mapping[str, Any], request_id: str) -> Any:
        """Perform the operation; only an answer worth keeping stays."""
        result: Any = None
        try:
            result = await self._store.perform(name, arguments)
            return result
        finally:
            if result is None or result == []:
                self._answers.pop(request_id, None)

    async def _told(self, answer: _Answer) -> Any:
        """Wait for an answer; when nobody waits for it any more, it is not made."""
        answer.askers += 1
        try:
            return await asyncio.shield(answer.task)
        finally:
            answer.askers -= 1
            if answer.askers == 0 and not answer.task.done():
                answer.task.cancel()

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._answers.pop(request_id, None)

    def _expire(self) -> None:
        oldest = self._clock() - ANSWER_LIFETIME_SECONDS
        while self._answers and (len(self._answers) > MOST_ANSWERS or next(iter(self._answers.values())).time < oldest):
            self._answers.popitem(last=False)
