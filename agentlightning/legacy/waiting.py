"""Requests that wait: held while they do, and let go all at once when their server stops."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["WaitingRoom"]

ResultT = TypeVar("ResultT")


class WaitingRoom:
    """Where requests wait; while it is closed, nobody waits."""

    def __init__(self) -> None:
        self._is_open = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Send everybody away, those who come later too."""
        self._is_open = False
        for task in self._tasks:
            task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait(self, coming: Coroutine[Any, Any, ResultT], seconds: float) -> ResultT | None:
        """What is coming, or None if it does not come in time or the room closes."""
        if not self._is_open:
            coming.close()
            return None
        task = asyncio.create_task(coming, name="agl-legacy-wait")
        self._tasks.add(task)
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            self._tasks.discard(task)
            task.cancel()
            await asyncio.wait({task})
        return None if task.cancelled() else task.result()
