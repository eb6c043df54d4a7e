"""DurableStore: what the stores that others may open too have in common.

Threads and connections are started on first use, so that a store may be handed to another process before; a forked
child leaves its parent's behind.
"""

import asyncio
import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from agentlightning.errors import StoreUnavailable
from agentlightning.store.base import LightningStoreCapabilities
from agentlightning.store.local import Call, LocalStore
from agentlightning.store.notices import NoticeFields
from agentlightning.store.tables import ALL_ROWS
from agentlightning.utils.once import fork_handlers

NOTICES_AT_HAND = 1000
"""Older ones are read from where they are kept."""


@dataclass(slots=True)
class Job:
    """A call and who waits for its result."""

    call: Call
    future: "asyncio.Future[Any] | None" = None
    """None if nobody does."""
    result: Any = None
    error: BaseException | None = None


def settle(jobs: Sequence[Job], here: asyncio.AbstractEventLoop | None = None) -> None:
    """Hand results to the loops that wait for them, once a loop; `here` is the loop whose thread this is."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if job.future is not None:
            by_loop.setdefault(job.future.get_loop(), []).append(job)
    for loop, of_loop in by_loop.items():
        if loop is here:
            _answer(of_loop)
            continue
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_answer, of_loop)


def _answer(jobs: Sequence[Job]) -> None:
    """Runs in the loop of the jobs' futures."""
    for job in jobs:
        future = job.future
        if future is None or future.done():
            continue
        if job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.result)


def closed_store(address: str) -> StoreUnavailable:
    return StoreUnavailable(f"Store '{address}' is closed; open it again.")


class Working(Protocol):
    """The threads and connections of a store that is in use."""

    readers: ThreadPoolExecutor

    def let_go(self) -> None:
        """The store was forgotten without being closed. Called by the garbage collector, so it waits for nothing."""

    def close(self) -> None:
        """Finish what was acknowledged or begun."""


WorkingT = TypeVar("WorkingT", bound=Working)


class DurableStore(LocalStore, Generic[WorkingT]):
    """A store of which several processes may have one each, on the same data."""

    def __init__(self, address: str, given: str, options: dict[str, Any], **others: Any) -> None:
        """
        Args:
            address: Where the data is, as messages name it.
            given: The first argument of the subclass, for a copy in another process.
            options: What such a copy gets too.
            others: Further arguments of `LocalStore`.
        """
        super().__init__(**options, **others)
        self._address = address
        self._given = given
        self._options = options
        self._starting = threading.Lock()  # protects `_working` and `_is_closed`
        self._working: WorkingT | None = None
        self._left_behind: list[WorkingT] = []  # a parent process's, which this one must not touch
        self._is_closed = False

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self._given, **self._options), ()

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": False}

    # ------------------------------------------------------------------ what a back end gives

    @abstractmethod
    def _open(self) -> WorkingT:
        """Start threads and connections."""

    @abstractmethod
    def _submit(self, working: WorkingT, job: Job) -> None:
        """Have a job run in a transaction that may write."""

    @abstractmethod
    def _read_notices(self, cursor: int, most_rows: int = ALL_ROWS) -> list[NoticeFields]:
        """Kept notices behind a cursor; runs in a reader's thread."""

    # ------------------------------------------------------------------ threads

    def _work(self) -> WorkingT:
        working = self._working
        if working is not None:
            return working
        with self._starting:
            if self._is_closed:
                raise closed_store(self._address)
            if self._working is None:
                self._working = self._open()
                self._forgotten = weakref.finalize(self, self._working.let_go)
                fork_handlers().add(self, DurableStore._leave_parent_behind)
            return self._working

    async def close(self) -> None:
        with self._starting:
            self._is_closed = True
            working, self._working = self._working, None
        if working is not None:
            self._forgotten.detach()
            await asyncio.get_running_loop().run_in_executor(None, working.close)
        self._board.wake_everyone()

    def _leave_parent_behind(self) -> None:
        """In a forked child: threads are gone, and closing the parent's connections could harm its data."""
        self._starting = threading.Lock()
        if self._working is not None:
            self._forgotten.detach()
            self._left_behind.append(self._working)
            self._working = None

    # ------------------------------------------------------------------ writes and notices

    def _run_write(self, call: Call) -> "asyncio.Future[Any]":
        future = asyncio.get_running_loop().create_future()
        self._submit(self._work(), Job(call, future))
        return future

    async def _notices_after(self, cursor: int) -> Sequence[NoticeFields] | None:
        notices = self._board.after(cursor)
        if not notices and self._is_closed:
            raise closed_store(self._address)
        if notices is not None:
            return notices
        kept = await asyncio.wrap_future(self._work().readers.submit(self._read_notices, cursor, NOTICES_AT_HAND))
        if not kept or kept[0][1] > cursor + 1:
            return None
        # Up to the next hole, which a crash of a database may have left.
        return [fields for place, fields in enumerate(kept, 1) if fields[1] == cursor + place]

    async def _latest_cursor(self) -> int:
        cursor = self._board.cursor
        kept = await asyncio.wrap_future(self._work().readers.submit(self._read_notices, cursor))
        return kept[-1][1] if kept else cursor
