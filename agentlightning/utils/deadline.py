"""A limit to how long something may be awaited."""

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["within"]

_T = TypeVar("_T")

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
