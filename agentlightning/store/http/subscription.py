"""Following a remote store's changes: over the live channel or by long polls, resumed where it broke off."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from agentlightning.store.http.codec import as_notice
from agentlightning.store.http.connection import ClientConnection
from agentlightning.store.http.retries import RetryPolicy, is_passing
from agentlightning.store.http.routes import NOTICES_PATH
from agentlightning.store.http.websocket import LiveSubscription
from agentlightning.types import Notice, NoticeKind

__all__ = ["follow"]

POLL_SECONDS = 20.0


def follow(
    connection: ClientConnection, policy: RetryPolicy, kinds: list[NoticeKind], after: int | None
) -> AsyncIterator[Notice]:
    """Notices for ever; those since this call, or behind the cursor `after`."""
    return _RemoteSubscription(connection, policy, kinds, after)


class _RemoteSubscription(AsyncIterator[Notice]):
    """One subscription, over as many connections as it takes."""

    def __init__(
        self, connection: ClientConnection, policy: RetryPolicy, kinds: list[NoticeKind], after: int | None
    ) -> None:
        self.cursor = after
        self._connection = connection
        self._policy = policy
        self._kinds = kinds
        self._live: LiveSubscription | None = None
        self._polled: deque[Notice] = deque()
        self._is_tried: asyncio.Future[None] | None = None
        # Begun at once: changes made after the call are told, however late the first one is asked for.
        self._beginning: asyncio.Task[None] | None = asyncio.create_task(self._begin())
        if after is None:
            self._is_tried = connection.loop.create_future()
            connection.hold_until(self._is_tried)
            self._beginning.add_done_callback(lambda _: self._let_go())

    async def __anext__(self) -> Notice:
        if self._beginning is not None:
            await asyncio.shield(self._beginning)  # whose reader may lose patience without losing its place
            self._beginning = None
        while True:
            if self._polled:
                notice = self._polled.popleft()
            elif self._live is not None:
                try:
                    notice = await self._live.next()
                except Exception as error:
                    if not is_passing(error):
                        raise
                    self._live = None
                    continue
            else:
                await self._begin()
                continue
            self.cursor = notice.cursor
            return notice

    async def aclose(self) -> None:
        """End the subscription."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        if self._live is not None:
            self._live.close()
            self._live = None

    async def _begin(self) -> None:
        """Subscribe, or poll once where there is no live channel."""
        await self._policy.persist(self._attempt, self._connection.is_healthy)

    async def _attempt(self) -> None:
        try:
            await self._subscribe()
        finally:
            self._let_go()  # also if it failed: others must not wait for as long as this one tries

    def _let_go(self) -> None:
        if self._is_tried is not None and not self._is_tried.done():
            self._is_tried.set_result(None)

    async def _subscribe(self) -> None:
        channel = await self._connection.live()
        if channel is not None:
            self._live = await channel.subscribe(list(self._kinds), self.cursor)
            self.cursor = self._live.cursor
        else:
            await self._poll()

    async def _poll(self) -> None:
        query: list[tuple[str, str]] = [("kinds", kind) for kind in self._kinds]
        if self.cursor is not None:
            query += [("after", str(self.cursor)), ("wait", str(POLL_SECONDS))]
        told = await self._connection.get(
            NOTICES_PATH, query, timeout=POLL_SECONDS + self._connection.address.request_timeout
        )
        self._polled.extend(map(as_notice, told["notices"]))
        self.cursor = told["cursor"]
