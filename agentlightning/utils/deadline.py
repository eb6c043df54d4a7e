"""Limits to how long something is awaited, and waiting for what can only be polled."""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

__all__ = ["POLL_SECONDS", "until", "within"]

_T = TypeVar("_T")

POLL_SECONDS: Final = 0.1
"""Between two looks at a condition."""


async def until(
    condition: Callable[[], bool],
    *,
    beside: "asyncio.Future[Any] | None" = None,
    timeout_seconds: float | None = None,
    interval_seconds: float = POLL_SECONDS,
) -> bool:
    """Wait until a condition holds, by polling it: a flag or an exit of another process cannot be awaited.

    Returns whether it holds; earlier, if the future `beside` it is done or the time is up.
    """
    clock = asyncio.get_running_loop().time
    deadline = math.inf if timeout_seconds is None else clock() + timeout_seconds
    while not condition():
        pause_seconds = min(interval_seconds, deadline - clock())
        if pause_seconds <= 0 or (beside is not None and beside.done()):
            return False
        if beside is None:
            await asyncio.sleep(pause_seconds)
        else:
            await asyncio.wait([beside], timeout=pause_seconds)
    return True


if sys.version_info >= (3, 11):

    async def within(seconds: float, awaitable: Awaitable[_T]) -> _T:
        """What is awaited, if it comes in time; else it is cancelled, and TimeoutError raised. Makes no task."""
        async with asyncio.timeout(seconds):
            return await awaitable

else:

    async def within(seconds: float, awaitable: Awaitable[_T]) -> _T:
        """What is awaited, if it comes in time; else it is cancelled, and TimeoutError raised."""
        try:
            return await asyncio.wait_for(awaitable, seconds)
        except asyncio.TimeoutError as error:  # which is a class of its own before Python 3.11
            raise TimeoutError from error
