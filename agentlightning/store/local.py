"""LocalStore: what the stores that live in this process have in common.

Every operation is its behaviour run in a transaction; the back end decides where (`_write`, `_read`). What cannot be
one transaction is written here once: waiting for rollouts and for work, subscriptions, and the watchdog's clock, which
also ticks while only a waiter waits.
"""

import math
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from typing_extensions import Self

from agentlightning.errors import ConfigurationError
from agentlightning.store.base import LightningStore, LightningStoreCapabilities, LightningStoreStatistics
from agentlightning.store.behaviour import BEHAVIOURS
from agentlightning.store.behaviour.attempts import mark_overdue
from agentlightning.store.behaviour.rollouts import Settled, finished_rollouts
from agentlightning.store.copies import detached
from agentlightning.store.lifecycle import FINAL_ROLLOUT_STATUSES, LOST_WORKER_SECONDS
from agentlightning.store.notices import DEFAULT_CAPACITY, Listener, NoticeBoard, NoticeFields, checked_kinds
from agentlightning.store.operations import Operation, forward_operations
from agentlightning.store.transaction import Setting, StoreLimits, Transaction
from agentlightning.types import AttemptedRollout, Notice, NoticeKind, Rollout
from agentlightning.utils.metrics import MetricsBackend

Clock = Callable[[], float]

DEFAULT_MAX_SPAN_BYTES = 32 * 1024 * 1024
DEFAULT_MAX_ATTEMPT_BYTES = 256 * 1024 * 1024
DEFAULT_MAX_ATTEMPT_SPANS = 100_000
OPERATION_SECONDS = "agl_store_operation_seconds"
TICK_SECONDS = 1.0
GAP_SECONDS = 5.0
"""A busy process ticks late by less than this."""


def wall_clock() -> float:
    """Seconds since the epoch, looked up at each call so that a test may replace `time.time`."""
    return time.time()


class Watchdog:
    """When the watchdog looks at the schedule: once a moment of it has passed, debounced if the user asked for that.

    While the store was closed or its process stopped, nobody could take heartbeats: leases count from then on. A thread
    ticks once a second while something is scheduled. Ticks that lie far apart by the monotonic clock mean that the
    process was stopped; a wall clock that went another way than the monotonic one was set, or the machine slept.
    Little work is no sign of either.

    Args:
        is_wanted: A method of the owner, which is not kept alive by this: whether anything is scheduled.
    """

    def __init__(self, debounce_seconds: float, now: float, is_wanted: Callable[[], bool]) -> None:
        self.debounce_seconds = debounce_seconds
        self._is_wanted = weakref.WeakMethod(is_wanted)
        self._opened_time, self._resumed_time, self._last_look = now, -math.inf, -math.inf
        self._last_tick = (0.0, 0.0)  # by the monotonic and the wall clock
        self._resumed: float | None = None  # by the monotonic clock, of a suspension that no look has seen yet
        self._thread: threading.Thread | None = None

    def look(self, due: float | None, now: float) -> "Call | None":
        """What to do now, if anything, `due` being the earliest moment of the schedule."""
        if due is None:
            return None
        if self._thread is None or not self._thread.is_alive():  # it ended, or is that of a parent process
            self._last_tick = (time.monotonic(), time.time())
            self._thread = threading.Thread(target=self._run, name="agl-store-watchdog", daemon=True)
            self._thread.start()
        if now <= due or now - self._last_look < self.debounce_seconds:
            return None
        self._last_look = now
        self.tick()
        if (resumed := self._resumed) is not None:
            self._resumed_time, self._resumed = now - (time.monotonic() - resumed), None
        return Call("watchdog", mark_overdue, (self._opened_time, self._resumed_time), watchdog=False)

    def tick(self) -> None:
        """See whether the process was suspended since the last tick."""
        (before, wall_before), now, wall = self._last_tick, time.monotonic(), time.time()
        self._last_tick = now, wall
        if now - before > GAP_SECONDS or abs(wall - wall_before - (now - before)) > GAP_SECONDS:
            self._resumed = now

    def _run(self) -> None:
        while (is_wanted := self._is_wanted()) is not None and is_wanted():
            self.tick()
            del is_wanted  # its owner may go while this thread sleeps
            time.sleep(TICK_SECONDS)


@dataclass(slots=True)
class Call:
    """One operation to be run in a transaction."""

    name: str
    behaviour: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    watchdog: bool = True
    """Whether overdue attempts are marked first."""
    is_large: bool = False
    """Whether it may take long, so that an event loop should not run it itself."""
    spills: bool = False
    """Whether it writes so much that some is applied before the rest is known, in a transaction of its own."""


def execute(call: Call, tx: Transaction, now: float) -> Any:
    """Run a call: what it wrote is applied when all of it is known. The result is the caller's own."""
    try:
        result = detached(call.behaviour(tx, now, *call.args, **call.kwargs))
        tx.apply()
    except BaseException:
        tx.discard()
        raise
    return result


def _operation_method(op: Operation) -> Callable[..., Any]:
    behaviour = BEHAVIOURS.get(op.name)
    if behaviour is None:
        return op.declared  # the class below defines it
    name, watchdog = op.name, op.watchdog

    async def claim(self: "LocalStore", *args: Any, **kwargs: Any) -> Any:
        call, wait = Call(name, behaviour, args, kwargs, watchdog), kwargs.get("wait")
        return await (self._write(call) if wait is None or wait <= 0.0 else self._claim_patiently(call, wait))

    async def write(self: "LocalStore", *args: object, **kwargs: object) -> Any:
        call = Call(name, behaviour, args, kwargs, watchdog)
        return self._run_at_once(call) if self._is_quick and self._tracker is None else await self._write(call)

    async def read(self: "LocalStore", *args: object, **kwargs: object) -> object:
        call = Call(name, behaviour, args, kwargs, watchdog)
        return self._run_at_once(call) if self._is_quick and self._tracker is None else await self._read(call)

    if op.is_claim:
        return claim
    return write if op.mutates else read


@forward_operations(_operation_method)
class LocalStore(LightningStore):
    """A store in this process."""

    _is_quick: ClassVar = False
    """Whether calls are run where they are made, by `_run_at_once`."""

    def __init__(
        self,
        *,
        max_span_bytes: int = DEFAULT_MAX_SPAN_BYTES,
        max_attempt_bytes: int = DEFAULT_MAX_ATTEMPT_BYTES,
        max_attempt_spans: int = DEFAULT_MAX_ATTEMPT_SPANS,
        tracker: MetricsBackend | None = None,
        scan_debounce_seconds: float = 0.0,
        lost_worker_seconds: float = LOST_WORKER_SECONDS,
        clock: Clock | None = None,
        kept_notices: int = DEFAULT_CAPACITY,
    ) -> None:
        self.max_span_bytes = max_span_bytes
        if not lost_worker_seconds > 0:
            raise ConfigurationError(
                f"lost_worker_seconds is {lost_worker_seconds}; give a number above 0, or math.inf to wait for ever."
            )
        self._limits = StoreLimits(max_span_bytes, max_attempt_bytes, max_attempt_spans, lost_worker_seconds)
        self._clock = clock or wall_clock
        self._start_time = self._clock()
        self._watch = Watchdog(scan_debounce_seconds, self._start_time, self._is_scheduled)
        self._board = NoticeBoard(kept_notices)
        self._tracker = tracker
        if tracker is not None:
            tracker.register_histogram(OPERATION_SECONDS, ["operation"])

    # ------------------------------------------------------------------ what a back end gives

    @abstractmethod
    def _run_write(self, call: Call) -> Awaitable[object]:
        """Run a call in a transaction that may write, with overdue attempts marked before it."""

    @abstractmethod
    def _run_read(self, call: Call) -> Awaitable[object]:
        """Run a call in a transaction that only reads, with overdue attempts marked before it."""

    @abstractmethod
    def _next_due(self) -> float | None:
        """When the watchdog must look again, at the earliest; None if nothing is scheduled."""

    @abstractmethod
    async def _notices_after(self, cursor: int) -> Sequence[NoticeFields] | None:
        """The next committed notices behind a cursor; None if some of them are gone."""

    def _run_at_once(self, call: Call) -> object:
        """Run a call, at the cost of no coroutine."""
        raise NotImplementedError

    def _is_scheduled(self) -> bool:
        """Whether the watchdog has anything to wait for."""
        return self.state == "open" and self._next_due() is not None

    def number_at_once(self, rollout_ids: Sequence[str]) -> Sequence[int] | None:
        """As `get_many_span_sequence_ids`, without an event loop; None where numbers must be waited for."""
        return None

    def _newest_cursor(self) -> int:
        return self._board.cursor

    # ------------------------------------------------------------------ running calls

    def _write(self, call: Call) -> Awaitable[Any]:
        return self._run_write(call) if self._tracker is None else self._measured(self._run_write, call, self._tracker)

    def _read(self, call: Call) -> Awaitable[Any]:
        return self._run_read(call) if self._tracker is None else self._measured(self._run_read, call, self._tracker)

    async def _measured(self, run: Callable[[Call], Awaitable[object]], call: Call, tracker: MetricsBackend) -> object:
        began = time.perf_counter()
        try:
            return await run(call)
        finally:
            tracker.observe_histogram(OPERATION_SECONDS, time.perf_counter() - began, {"operation": call.name})

    # ------------------------------------------------------------------ the store itself

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"thread_safe": True, "async_safe": True, "zero_copy": False, "otlp_traces": False}

    async def statistics(self) -> LightningStoreStatistics:
        counts: dict[str, Any] = await self._read(Call("statistics", lambda tx, now: tx.counts()))
        known = LightningStoreStatistics(name=type(self).__name__, uptime=self._clock() - self._start_time)
        known.update(counts)  # type: ignore[typeddict-item] # `counts` uses the same names
        return known

    async def check_writable(self) -> None:
        """Write a little where all writes go; what a write would raise is raised."""
        call = Call("check_writable", lambda tx, now: tx.put(Setting("checked_time", str(now))), watchdog=False)
        await self._write(call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # ------------------------------------------------------------------ waiting

    async def _claim_patiently(self, call: Call, wait: float) -> object:
        """Run a claim again whenever there may be work, until there is or time is over."""
        deadline, claim_id = time.monotonic() + wait, call.kwargs.get("claim_id")
        claimed = await self._write(call)
        if not claimed:
            with self._board.queueing(claim_id) as waiter:
                while time.monotonic() < deadline and not (claimed := await self._write(call)):
                    await self._sleep(waiter, deadline)
        if not claimed:
            return await self._write(replace(call, kwargs={**call.kwargs, "wait": None}))
        if claim_id is not None:
            self._board.wake_copies(claim_id)
        return claimed

    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[AttemptedRollout | Rollout]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        pending = dict.fromkeys(rollout_ids)
        settled: Settled = {}
        unfinished: set[str] = set()

        def is_last(notice: Notice) -> bool:
            """Count down, so that the waiter is woken once and not for each rollout."""
            if notice.kind == "rollout" and notice.status in FINAL_ROLLOUT_STATUSES:
                unfinished.discard(notice.rollout_id or "")
            return not unfinished

        with self._board.listening(is_last) as listener:
            while True:
                unfinished.update(pending)
                settled |= await self._read(Call("wait_for_rollouts", finished_rollouts, (list(pending),)))
                pending = {rollout_id: None for rollout_id in pending if rollout_id not in settled}
                if not pending or time.monotonic() >= deadline:
                    return [rollout for r in dict.fromkeys(rollout_ids) if (rollout := settled.get(r)) is not None]
                unfinished.intersection_update(pending)
                if unfinished:  # else the last of them finished while we were looking
                    await self._sleep(listener, deadline)

    async def _sleep(self, listener: Listener, deadline: float) -> bool:
        """Whether it was woken before the deadline (monotonic), and before the moment the watchdog must look."""
        due, remaining = self._next_due(), deadline - time.monotonic()
        if due is not None:
            remaining = min(remaining, max(due - self._clock(), 0.0) + _PAST_DUE_SECONDS)
        return await listener.wait(None if math.isinf(remaining) else max(remaining, 0.0))

    def subscribe(
        self, kinds: Iterable[NoticeKind] | None = None, *, after: int | None = None
    ) -> AsyncIterator[Notice]:
        return Subscription(self, checked_kinds(kinds), self._newest_cursor() if after is None else after)

    async def _latest_cursor(self) -> int:
        """The newest cursor there is, also if another process made it."""
        return self._newest_cursor()


def local_store(store: LightningStore) -> LocalStore | None:
    """The store of this process that a wrapper, or a server, stands before; None if it lives elsewhere."""
    inner: object = store
    while not isinstance(inner, LocalStore):
        inner = getattr(inner, "store", None)
        if inner is None:
            return None
    return inner


class Subscription(AsyncIterator[Notice]):
    """Notices as they come. A reader that is cancelled while it waits loses none."""

    def __init__(self, store: LocalStore, wanted: frozenset[str], cursor: int) -> None:
        self.cursor = cursor
        """How far has been read; give it to `subscribe(after=…)` to resume."""
        self._store = store
        self._wanted = wanted
        self._unread: deque[NoticeFields] = deque()
        self._has_begun = False
        self._is_closed = False

    async def __anext__(self) -> Notice:
        while not self._is_closed:
            while self._unread:
                notice = Notice(*self._unread.popleft())
                self.cursor = notice.cursor
                if notice.kind in self._wanted:
                    return notice
            if await self._has_gap():
                return Notice("gap", self.cursor)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the subscription."""
        self._is_closed = True

    async def _has_gap(self) -> bool:
        """Read on, waiting if there is nothing; True if what should follow is gone, and the cursor has moved on."""
        store = self._store
        with store._board.listening(lambda notice: notice.kind in self._wanted) as listener:
            notices = await store._notices_after(self.cursor)
            if notices is None or (not notices and await self._is_ahead()):
                self.cursor = await store._latest_cursor()
                return True
            self._unread.extend(notices)
            if not notices and not await store._sleep(listener, math.inf):
                await store._read(_LOOK)
        return False

    async def _is_ahead(self) -> bool:
        """Whether the cursor is one that this store never gave: it was another store's, which this one replaced."""
        if self._has_begun:
            return False
        self._has_begun = True
        return self.cursor > self._store._newest_cursor() and self.cursor > await self._store._latest_cursor()


_PAST_DUE_SECONDS = 0.001
"""A moment is past when the clock shows more, so a waiter sleeps this much beyond it."""

_LOOK = Call("look", lambda tx, now: None)
"""Nothing but an occasion for the watchdog."""
