"""The worker pool of a runner: slots for agents, a quota of rollouts, and claims made ahead of free slots.

A slot is free as soon as its agent has ended, while the end of the attempt is still being written. A rollout that was
claimed ahead starts there at once, so that slots do not stay empty while the store answers. Claims that wait too long
go back to the queue, where another runner can take them.
"""

import asyncio
import contextvars
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final

from agentlightning.store.claims import Claim

LONGEST_AHEAD_SECONDS: Final = 0.25
"""How long a claim may wait for a slot before it is returned."""
LEAVING_SECONDS: Final = 5.0
"""How long the store may take to answer a runner that was cancelled: the store may be gone, and the runner leaves."""
MEAN_WEIGHT: Final = 0.05
"""Of the latest time in a moving average."""
AHEAD_MARGIN: Final = 2.0
"""Factor on the average need: agents that end together need more claims at once."""
FIRST_ANSWER_SECONDS: Final = 0.01
"""First guess of the time that the store takes to answer."""


class ClaimAhead:
    """Estimates how many claims are worth having ahead of the agents, from moving averages of two times."""

    def __init__(self) -> None:
        self._agent_seconds: float | None = None
        self._answer_seconds = FIRST_ANSWER_SECONDS

    def note_agent(self, seconds: float) -> None:
        """An agent took this long."""
        before = seconds if self._agent_seconds is None else self._agent_seconds
        self._agent_seconds = before + MEAN_WEIGHT * (seconds - before)

    def note_answer(self, seconds: float) -> None:
        """The next claim arrived this long after an agent had ended."""
        self._answer_seconds += MEAN_WEIGHT * (seconds - self._answer_seconds)

    def count(self, size: int) -> int:
        """How many claims the agents of this many slots use up while the store answers; 0 where agents take long."""
        if self._agent_seconds is None:
            return 0
        needed = AHEAD_MARGIN * size * self._answer_seconds
        return size if needed >= self._agent_seconds * size else round(needed / self._agent_seconds)


class WorkerPool:
    """Agents at work, up to a number; used in one event loop.

    Args:
        size: How many agents run at once.
        quota: How many rollouts may be claimed in all; None sets no limit.
        claims_ahead: Whether to claim more than can start at once; the store must take claims back.
        is_claiming: Whether more may be claimed now: not while the runner pauses, or once it stops.
        run_attempt: Runs a claimed rollout; returns what was claimed in the step that finished it.
        return_claims: Puts claims back into the queue; returns whether that worked, and raises nothing.
    """

    def __init__(
        self,
        size: int,
        quota: int | None,
        *,
        claims_ahead: bool,
        is_claiming: Callable[[], bool],
        run_attempt: "Callable[[Claim, Slot], Awaitable[Claim | None]]",
        return_claims: Callable[[Sequence[Claim]], Awaitable[bool]],
    ) -> None:
        self.is_claiming = is_claiming
        self._size = size
        self._quota = quota
        """What is left. Below zero when more came than were claimed: the answer to an earlier request, which was lost,
        came with them."""
        self._claims_ahead = claims_ahead
        self._run_attempt = run_attempt
        self._return_to_queue = return_claims
        self.loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._returns: set[asyncio.Task[None]] = set()
        self._working = 0
        self._expected = 0
        """Claims that are requested and not yet here."""
        self._waiting: deque[tuple[Claim, float]] = deque()
        """Claims without a slot, and since when they wait."""
        self._ahead = ClaimAhead()
        self._timer: asyncio.TimerHandle | None = None
        self._has_changed = asyncio.Event()
        self._is_cancelled = False
        self._error: BaseException | None = None

    # ------------------------------------------------------------------ how much to claim

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks or self._waiting or self._returns)

    @property
    def is_spent(self) -> bool:
        """Whether the quota is used up."""
        return self._quota is not None and self._quota <= 0

    @property
    def free(self) -> int:
        """Slots for which nothing is claimed."""
        return self._size - self._working - self._expected - len(self._waiting)

    @property
    def room(self) -> int:
        """How many more claims are of use: for free slots, and ahead of them."""
        return self.free + self._ahead_count

    @property
    def _ahead_count(self) -> int:
        # A single agent runs strictly after the one before: its user may rely on that.
        if self._size == 1 or not self._claims_ahead:
            return 0
        return self._ahead.count(self._size)

    def reserve(self, count: int) -> int:
        """Take so many from the quota before claiming them; returns how many may be claimed. `take` must follow."""
        if self._quota is not None:
            count = max(min(count, self._quota), 0)
            self._quota -= count
        self._expected += count
        return count

    def take(self, claims: Sequence[Claim], *, reserved: int) -> None:
        """Start these as there are free slots; the others wait."""
        self._expected -= reserved
        self._refund(reserved - len(claims))
        self._start_all(claims)

    def _refund(self, count: int) -> None:
        if self._quota is not None:
            self._quota += count

    async def change(self, timeout_seconds: float) -> None:
        """Wait until more should be claimed, or an attempt has ended, or the time is up."""
        timer = self.loop.call_later(timeout_seconds, self._has_changed.set)
        await self._has_changed.wait()
        timer.cancel()
        self._has_changed.clear()
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ running

    def _start_all(self, claims: Sequence[Claim]) -> None:
        now = self.loop.time()
        self._waiting.extend((claim, now) for claim in claims)
        self._fill()

    def _fill(self) -> None:
        """Start what waits, for as long as there are free slots."""
        while (claim := self._next()) is not None:
            self._start(self._run_from(claim), self._tasks)
        if self._waiting and self._timer is None and not self._is_cancelled:
            self._timer = self.loop.call_later(LONGEST_AHEAD_SECONDS, self._return_late_claims)

    def _start(self, work: Coroutine[object, object, None], tasks: "set[asyncio.Task[None]]") -> None:
        # In a context of its own: the current one may be inside the trace of an agent that has just ended.
        task = self._context.copy().run(self.loop.create_task, work)
        tasks.add(task)
        task.add_done_callback(functools.partial(self._end_task, tasks))

    def _end_task(self, tasks: "set[asyncio.Task[None]]", task: "asyncio.Task[None]") -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self._has_changed.set()

    async def _run_from(self, claim: Claim | None) -> None:
        """Run a claimed rollout, and then others, for as long as some wait."""
        while claim is not None:
            slot, following = Slot(self), None
            try:
                following = await self._run_attempt(claim, slot)
            finally:
                slot.close(following)
            claim = self._next()
            if self._waiting:
                self._fill()

    def _next(self) -> Claim | None:
        """What to start now, in a slot that is then taken."""
        if not self._waiting or self._working >= self._size or self._is_cancelled:
            return None
        if not self.is_claiming():
            return None  # it is going to be returned
        self._working += 1
        return self._waiting.popleft()[0]

    def end_agent(self, seconds: float) -> bool:
        """Free the slot of an agent that ran this long; returns whether to claim another as its attempt is finished."""
        self._ahead.note_agent(seconds)
        self._working -= 1
        if self._waiting:
            self._fill()
        ahead = self._ahead_count
        room = self.free + ahead
        is_claiming = room > 0 and self.reserve(1) == 1
        if room - is_claiming > ahead // 2:
            self._has_changed.set()
        return is_claiming

    def end_attempt(self, following: Claim | None, seconds: float) -> None:
        """An attempt that was to claim another is finished, this long after its agent had ended."""
        self._expected -= 1
        if following is None:
            self._refund(1)
            self._has_changed.set()
        else:
            self._ahead.note_answer(seconds)
            self._waiting.append((following, self.loop.time()))

    # ------------------------------------------------------------------ returning claims

    def _return_late_claims(self) -> None:
        """Return all claims if the first has waited for too long: agents take longer than they did."""
        self._timer = None
        if not self._waiting:
            return
        until = self._waiting[0][1] + LONGEST_AHEAD_SECONDS
        if self.loop.time() < until:
            self._timer = self.loop.call_at(until, self._return_late_claims)
            return
        self._ahead = ClaimAhead()
        self._start(self.return_claims(), self._returns)

    async def return_claims(self) -> None:
        """Return what waits to the queue; what cannot be returned starts here when there is a slot."""
        if not self._waiting:
            return
        claims = [claim for claim, _ in self._waiting]
        self._waiting.clear()
        if await self._return_to_queue(claims):
            self._refund(len(claims))
        else:
            self._start_all(claims)

    # ------------------------------------------------------------------ ending

    async def finish(self) -> None:
        """Wait for all attempts, and return what is claimed then, or run it where the store cannot take it back."""
        while self._tasks or self._returns:
            await asyncio.wait(self._tasks | self._returns)
        await self.return_claims()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._waiting.clear()  # what is left could not be returned just now: the store's own time limits will settle it
        if self._error is not None:
            raise self._error

    async def cancel(self) -> None:
        """Cancel all attempts, and return what waits if the store answers in time."""
        self._is_cancelled = True
        await _cancel(self._tasks)
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting:
            self._start(self.return_claims(), self._returns)
        if self._returns:
            _, late = await asyncio.wait(self._returns, timeout=LEAVING_SECONDS)
            await _cancel(late)


async def _cancel(tasks: "set[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


class Slot:
    """The place of one agent in the pool, for one attempt."""

    __slots__ = ("_claims_next", "_is_taken", "_pool", "_since")

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._since = pool.loop.time()
        self._is_taken = True
        self._claims_next = False

    def release(self) -> None:
        """Free the slot: the agent has ended."""
        if self._is_taken:
            began, self._since, self._is_taken = self._since, self._pool.loop.time(), False
            self._claims_next = self._pool.end_agent(self._since - began)

    @property
    def claims_next(self) -> bool:
        """Whether to claim the next rollout in the step that finishes the attempt."""
        return self._claims_next and self._pool.is_claiming()

    def close(self, following: Claim | None) -> None:
        """The attempt is finished, and this was claimed in the same step."""
        self.release()
        if self._claims_next:
            self._pool.end_attempt(following, self._pool.loop.time() - self._since)
