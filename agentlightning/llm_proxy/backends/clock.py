"""The time a fleet lives by, as one object, so that a test can be the one who moves it."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Alarm", "Clock"]


class Alarm(Protocol):
    """Something that will be called later, unless it is cancelled."""

    def cancel(self) -> None: ...


class Clock:
    """The clock of the machine and the timers of the running loop."""

    def now(self) -> float:
        """Seconds that never run backwards; only differences mean anything."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        return asyncio.get_running_loop().call_later(seconds, callback)
