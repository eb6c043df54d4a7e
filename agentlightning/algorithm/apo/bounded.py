"""Many things at once, but not too many; when one fails, the others end too."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["gathered"]

_T = TypeVar("_T")


async def gathered(coroutines: Iterable[Coroutine[Any, Any, _T]], *, limit: int) -> list[_T]:
    """The results, in the given order; at most `limit` run at a time, and they begin in that order."""
    gate = asyncio.Semaphore(limit)
    works = list(coroutines)

    async def run(work: Coroutine[Any, Any, _T]) -> _T:
        async with gate:
            return await work

    tasks = [asyncio.ensure_future(run(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            work.close()  # those that never began
        raise
