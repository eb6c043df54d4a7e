"""Change notices: published after a commit, kept for a while, and waited for without polling.

A `NoticeBoard` is a bounded log with numbered entries. Subscribers each hold a cursor into it, so a slow one costs
nothing and is told of a gap when it fell behind the log. Two kinds of waiting coroutines hang on it, woken from any
thread: listeners, which are woken by every notice they care about, and queue waiters, of which one is woken for each
rollout that enters the queue.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from agentlightning.errors import InvalidQuery
from agentlightning.store.lifecycle import QUEUE_STATUSES
from agentlightning.types import NOTICE_KINDS, Notice, NoticeKind

NoticeFields = tuple[NoticeKind, int, str | None, str | None, str | None, str | None, int | None]
"""The fields of a `Notice` in order. The log keeps plain tuples: they are cheap to make and, unlike a subclass of
tuple, no burden to the garbage collector. A `Notice` is made when somebody reads one."""
_CURSOR: Final = 1

DEFAULT_CAPACITY = 100_000
"""How many notices are kept for subscribers that come back."""


def checked_kinds(kinds: Iterable[NoticeKind] | None) -> frozenset[NoticeKind]:
    """The kinds of notices that a subscriber asks for; all, if it names none."""
    wanted = frozenset(NOTICE_KINDS if kinds is None else kinds)
    unknown = wanted.difference(NOTICE_KINDS)
    if unknown:
        raise InvalidQuery(f"There are no notices of kind {sorted(unknown)}; use some of {list(NOTICE_KINDS)}.")
    return wanted


class Listener:
    """One waiting coroutine; `wake` may be called from any thread."""

    def __init__(self, wants: Callable[[Notice], bool]) -> None:
        self.wants = wants
        self.is_woken = False
        self.claim_id: str | None = None
        """Of a claim that waits, and of which a copy may wait too."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        if not self.is_woken:
            self.is_woken = True
            with suppress(RuntimeError):  # the listener's loop is closed, so nobody waits there
                self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float | None) -> bool:
        """Whether it was woken, within `timeout` seconds."""
        # Not wait_for, which before Python 3.12 could lose a cancellation that comes together with the event.
        waiting = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([waiting], timeout=timeout)
        finally:
            waiting.cancel()
        if not self._event.is_set():
            return False
        self._event.clear()
        self.is_woken = False
        return True


class NoticeBoard:
    """The log of one store's changes in this process."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._lock = threading.Lock()  # protects everything below
        self._log: deque[NoticeFields] = deque(maxlen=capacity)
        self._cursor = 0
        self._listeners: list[Listener] = []
        self._queue_waiters: deque[Listener] = deque()

    @property
    def cursor(self) -> int:
        """Number of the newest notice."""
        return self._cursor

    @property
    def has_waiters(self) -> bool:
        return bool(self._listeners or self._queue_waiters)

    def start_at(self, cursor: int) -> None:
        """Begin behind notices that were published before this board existed."""
        self._cursor = cursor

    def skip_to(self, cursor: int) -> None:
        """Notices up to this number are not here; who has not read them finds them elsewhere, or has a gap."""
        with self._lock:
            self._log.clear()
            self._cursor = cursor
        self.wake_everyone()

    def publish(self, notices: Sequence[NoticeFields]) -> None:
        """Append notices in the order of their numbers, skipping those already known, and wake who waits for them."""
        with self._lock:
            if notices[0][_CURSOR] <= self._cursor:
                notices = [notice for notice in notices if notice[_CURSOR] > self._cursor]
                if not notices:
                    return
            self._log.extend(notices)
            self._cursor = notices[-1][_CURSOR]
            if self._listeners or self._queue_waiters:
                self._wake_for([Notice(*notice) for notice in notices])

    def wake_everyone(self) -> None:
        """Have every waiting coroutine look again, because the time it may sleep has changed."""
        with self._lock:
            for listener in (*self._listeners, *self._queue_waiters):
                listener.wake()

    def wake_copies(self, claim_id: str) -> None:
        """Wake claims of which another copy has got work: they find that it is theirs too."""
        with self._lock:
            for waiter in self._queue_waiters:
                if waiter.claim_id == claim_id:
                    waiter.wake()

    def after(self, cursor: int) -> Sequence[NoticeFields] | None:
        """Notices behind a cursor, oldest first; None if some of them are no longer kept here.

        They are the log's own, so that a thousand subscribers that do not read hold them once.
        """
        with self._lock:
            if cursor >= self._cursor:
                return ()
            if not self._log or self._log[0][_CURSOR] > cursor + 1:
                return None
            wanted = self._cursor - cursor
            newest_first = [fields for fields, _ in zip(reversed(self._log), range(wanted), strict=False)]
            return newest_first[::-1]

    @contextmanager
    def listening(self, wants: Callable[[Notice], bool]) -> Iterator[Listener]:
        """Be woken by notices one wants, for the length of the block.

        Args:
            wants: Asked under the board's lock, about every notice that is published while nothing has woken it yet.
        """
        listener = Listener(wants)
        with self._lock:
            self._listeners.append(listener)
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners.remove(listener)

    @contextmanager
    def queueing(self, claim_id: str | None = None) -> Iterator[Listener]:
        """Stand in line for work, for the length of the block; whoever leaves with an unused call passes it on."""
        waiter = Listener(lambda notice: False)
        waiter.claim_id = claim_id
        with self._lock:
            self._queue_waiters.append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._queue_waiters.remove(waiter)
                if waiter.is_woken:
                    self._call_waiters(1)

    def _wake_for(self, notices: Sequence[Notice]) -> None:
        queued = sum(notice.kind == "rollout" and notice.status in QUEUE_STATUSES for notice in notices)
        self._call_waiters(queued)
        for listener in self._listeners:
            # Each is asked about every notice, because it may count them.
            if not listener.is_woken and any([listener.wants(notice) for notice in notices]):  # noqa: C419
                listener.wake()

    def _call_waiters(self, count: int) -> None:
        """Wake the first `count` waiters in line that were not called yet."""
        for waiter in self._queue_waiters:
            if count == 0:
                return
            if not waiter.is_woken:
                waiter.wake()
                count -= 1
