"""Telling about new resources: a thread that asks a server for the next ones and calls back.

Each callback has a conversation of its own with the server, so it hears of the present resources first and then of
every change, whenever it was registered.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from agentlightning.types import ResourcesUpdate
from agentlightning.utils.loop_thread import LoopThread

__all__ = ["Callback", "ResourcesWatch", "call_back"]

logger = logging.getLogger(__name__)

Callback = Callable[[ResourcesUpdate], object]
"""Is called with new resources; if it returns something awaitable, that is awaited."""

NextResources = Callable[[ResourcesUpdate | None], Awaitable[ResourcesUpdate | None]]
"""Gives resources other than the seen ones, as soon as there are some; None if there are none for now."""


async def call_back(callback: Callback, update: ResourcesUpdate) -> None:
    """Call with new resources; what the callback raises is logged, and the next update still comes."""
    try:
        result = callback(update)
        if inspect.isawaitable(result):
            await result
    except Exception:
        logger.exception("A callback failed for resources %s.", update.resources_id)


class ResourcesWatch:
    """Calls back from a thread of its own until it is closed."""

    def __init__(self, next_resources: NextResources, pause_seconds: float) -> None:
        """Prepare to ask; nothing runs yet.

        Args:
            next_resources: Asks the server.
            pause_seconds: Least time between two questions to a server that answers without news.
        """
        self._next_resources = next_resources
        self._pause_seconds = pause_seconds
        self._thread = LoopThread("agl-legacy-resources")
        self._thread_id: int | None = None
        self._following: list[asyncio.Task[None]] = []

    def add(self, callback: Callback) -> None:
        self._thread.run(self._begin(callback))

    def close(self) -> None:
        """End the thread; from within a callback, it ends to ask and its thread stays idle."""
        if threading.get_ident() == self._thread_id:
            for task in self._following:
                task.cancel()
        else:
            self._thread.stop()

    async def _begin(self, callback: Callback) -> None:
        self._thread_id = threading.get_ident()
        self._following.append(asyncio.create_task(self._follow(callback), name="agl-legacy-resources"))

    async def _follow(self, callback: Callback) -> None:
        seen: ResourcesUpdate | None = None
        while True:
            began = time.monotonic()
            update = await self._next_resources(seen)
            if update is None:
                await asyncio.sleep(max(self._pause_seconds - (time.monotonic() - began), 0.0))
            else:
                seen = update
                await call_back(callback, update)
