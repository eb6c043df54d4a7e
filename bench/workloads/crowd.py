"""Many clients, spread over a few processes that begin together.

A process runs a member: a coroutine function that is given `meet`, which returns when all members and the caller have
called it, and its share of the arguments. What it returns comes back to the caller.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from serving import allow_many_files
from store import package

MEETING_SECONDS = 300.0
STOP_SECONDS = 5.0

Meet = Callable[[], Awaitable[Any]]
Member = Callable[..., Coroutine[Any, Any, Any]]


class Crowd:
    """Member processes that run."""

    def __init__(self, processes: Sequence[Any], answers: Sequence[Any], meeting: Any) -> None:
        self._answers = answers
        self.pids: list[int] = [process.pid for process in processes]
        self.meet: Meet = partial(asyncio.to_thread, meeting.wait, MEETING_SECONDS)

    async def results(self) -> list[Any]:
        """What the members returned, in the order of their shares."""
        try:
            return [await asyncio.to_thread(answer.recv) for answer in self._answers]
        except EOFError:
            raise SystemExit("A process of clients ended without an answer.") from None


@asynccontextmanager
async def gathered(member: Member, shares: Sequence[tuple[Any, ...]]) -> AsyncIterator[Crowd]:
    """A process for each share, ended with this context."""
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(len(shares) + 1)
    processes, answers = [], []
    for share in shares:
        answer, telling = context.Pipe(duplex=False)
        process = context.Process(target=_be_member, args=(member, meeting, telling, share))
        process.start()
        telling.close()  # ours; with the member's own one the pipe ends, and nobody waits for a dead member
        processes.append(process)
        answers.append(answer)
    try:
        yield Crowd(processes, answers, meeting)
    finally:
        for process in processes:
            await asyncio.to_thread(process.join, STOP_SECONDS)
            process.kill()
            process.join()


def _be_member(member: Member, meeting: Any, telling: Any, share: tuple[Any, ...]) -> None:
    allow_many_files()
    logging.disable(logging.WARNING)

    async def run() -> Any:
        return await member(partial(asyncio.to_thread, meeting.wait, MEETING_SECONDS), *share)

    try:
        telling.send(asyncio.run(run()))
    except BaseException:
        meeting.abort()  # the others would wait in vain
        raise


@asynccontextmanager
async def clients_of(url: str, count: int) -> AsyncIterator[list[Any]]:
    """So many clients, each with connections of its own."""
    clients = [package().LightningStoreClient(url) for _ in range(count)]
    try:
        yield clients
    finally:
        await asyncio.gather(*[client.close() for client in clients])


def shares_of(count: int, parts: int) -> list[range]:
    """Numbers below `count`, dealt out in turns."""
    return [range(part, count, parts) for part in range(parts)]
