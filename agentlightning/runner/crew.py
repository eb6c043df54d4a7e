"""A crew: the agents that a runner has at work, and the claims that wait until one of them is done.

The place of an agent is free as soon as the agent has ended, while the end of its attempt is still being written. What
was claimed ahead begins there at once, so that places do not stand empty for as long as the store takes to answer.
Claims that nevertheless have to wait go back to the queue, where another runner may have them.
"""

import asyncio
import contextvars
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from agentlightning.runner.abilities import Abilities
from agentlightning.runner.pace import Pace
from agentlightning.runner.shift import Shift
from agentlightning.runner.turns import Turns
from agentlightning.store.claims import Claim

__all__ = ["LEAVING_SECONDS", "LONGEST_AHEAD_SECONDS", "Crew", "Place"]

LONGEST_AHEAD_SECONDS: Final = 0.25
"""How long a claim may wait for an agent to end before it is given back."""
LEAVING_SECONDS: Final = 5.0
"""How long the store may take to hear of what ends before its time: it may be gone, and whoever leaves does so now."""


class Crew:
    """Agents at work, up to a number; used in one event loop."""

    def __init__(
        self,
        size: int,
        shift: Shift,
        abilities: Abilities,
        *,
        run_attempt: "Callable[[Claim, Place], Awaitable[Claim | None]]",
        give_back: Callable[[Sequence[Claim]], Awaitable[bool]],
    ) -> None:
        """Nobody works yet.

        Args:
            size: How many agents work at once.
            shift: For which they work.
            abilities: What the store can do.
            run_attempt: Runs a claimed rollout, and returns what was claimed in the step that finished it.
            give_back: Returns claims to the queue, and whether that was done; raises nothing.
        """
        self.shift = shift
        self._size = size
        self._abilities = abilities
        self._run_attempt = run_attempt
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._working = 0
        self._coming = 0
        """Claims that are asked for and not yet here."""
        self._ahead: deque[tuple[Claim, float]] = deque()
        """Claims that wait, and since when."""
        self._pace = Pace()
        self._turns = Turns()
        self._watch: asyncio.TimerHandle | None = None
        self._has_changed = asyncio.Event()
        self._is_over = False
        self._error: BaseException | None = None

    # ------------------------------------------------------------------ how much can be claimed

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks or self._ahead or self._returning)

    @property
    def free(self) -> int:
        """Places for which nothing is claimed."""
        return self._size - self._working - self._coming - len(self._ahead)

    @property
    def room(self) -> int:
        """How many more claims are of use: for free places, and ahead."""
        return self.free + self._worth_ahead

    @property
    def _worth_ahead(self) -> int:
        # One agent alone works strictly after the other: its user may rely on that.
        if self._size == 1 or not (self._abilities.claims_next and self._abilities.takes_back):
            return 0
        return self._pace.worth_ahead(self._size)

    def expect(self, count: int) -> None:
        """So many claims are being asked for; `take` tells what came of it."""
        self._coming += count

    async def change(self, patience: float) -> None:
        """Wait until more should be claimed, or somebody has ended, or a moment has passed."""
        timer = self._loop.call_later(patience, self._has_changed.set)
        await self._has_changed.wait()
        timer.cancel()
        self._has_changed.clear()
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ working

    def take(self, claims: Sequence[Claim], *, expected: int) -> None:
        """Begin with these as there are free places; the others wait."""
        self._coming -= expected
        self.shift.release(expected - len(claims))
        self._begin_with(claims)

    def _begin_with(self, claims: Sequence[Claim]) -> None:
        now = self._loop.time()
        self._ahead.extend((claim, now) for claim in claims)
        self._fill()

    def _fill(self) -> None:
        """Begin with what waits, for as long as there are free places."""
        while (claim := self._next()) is not None:
            self._start(self._work_from(claim), self._tasks)
        if self._ahead and self._watch is None and not self._is_over:
            self._watch = self._loop.call_later(LONGEST_AHEAD_SECONDS, self._look_ahead)

    def _start(self, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> None:
        # In a context of its own: the current one may be inside the trace of an agent that has just ended.
        task = self._context.copy().run(self._loop.create_task, work)
        tasks.add(task)
        task.add_done_callback(functools.partial(self._end, tasks))

    async def _work_from(self, claim: Claim | None) -> None:
        """Run a claimed rollout, and then others, for as long as some are waiting."""
        while claim is not None:
            place, following = Place(self), None
            try:
                following = await self._run_attempt(claim, place)
            finally:
                place.close(following)
            claim = self._next()
            if self._ahead:
                self._fill()

    def _next(self) -> Claim | None:
        """What to begin with now, in a place that is then taken."""
        if not self._ahead or self._working >= self._size or self._is_over:
            return None
        if self._abilities.takes_back and not self.shift.goes_on():
            return None  # it is going to be given back
        self._working += 1
        return self._ahead.popleft()[0]

    def _end(self, tasks: "set[asyncio.Task[None]]", task: "asyncio.Task[None]") -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        self._has_changed.set()

    def end_agent(self, seconds: float, go_on: Callable[[], None]) -> bool:
        """An agent has ended after this time; returns whether to claim another as its attempt is finished.

        Args:
            go_on: Called when it is time to finish the attempt.
        """
        if self._size > 1:
            self._pace.worked(seconds)
            self._turns.queue(go_on)
        else:
            go_on()
        self._working -= 1
        if self._ahead:
            self._fill()
        ahead = self._worth_ahead
        room = self.free + ahead
        is_claiming = room > 0 and self._abilities.claims_next and self.shift.reserve(1) == 1
        self._coming += is_claiming
        if room - is_claiming > ahead // 2:
            self._has_changed.set()
        return is_claiming

    def end_attempt(self, following: Claim | None, seconds: float) -> None:
        """An attempt that was to claim another is finished, this time after its agent had ended."""
        self._coming -= 1
        if following is None:
            self.shift.release(1)
            self._has_changed.set()
        else:
            self._pace.waited(seconds)
            self._ahead.append((following, self._loop.time()))

    # ------------------------------------------------------------------ claims ahead

    def _look_ahead(self) -> None:
        """Give back all claims if the first has waited for too long: agents take longer than they did."""
        self._watch = None
        if not self._ahead:
            return
        until = self._ahead[0][1] + LONGEST_AHEAD_SECONDS
        if self._loop.time() < until:
            self._watch = self._loop.call_at(until, self._look_ahead)
            return
        self._pace = Pace()
        self._start(self.give_back(), self._returning)

    async def give_back(self) -> None:
        """Let others have what waits; what cannot be given back begins here, when there is a place."""
        if not (self._ahead and self._abilities.takes_back):
            return
        claims = [claim for claim, _ in self._ahead]
        self._ahead.clear()
        if await self._give_back(claims):
            self.shift.release(len(claims))
        else:
            self._begin_with(claims)

    # ------------------------------------------------------------------ ending

    async def finish(self) -> None:
        """Wait for all who work; what is claimed then is given back, or done where the store cannot take it back."""
        while self._tasks or self._returning:
            await asyncio.wait(self._tasks | self._returning)
        await self.give_back()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._ahead.clear()  # what is left could not be given back just now: the store's own time limits will settle it
        if self._error is not None:
            raise self._error

    async def cancel(self) -> None:
        """End all who work."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._watch is not None:
            self._watch.cancel()
        if self._ahead:
            self._start(self.give_back(), self._returning)
        if self._returning:
            _, late = await asyncio.wait(self._returning, timeout=LEAVING_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)


class Place:
    """Where one agent works, in one attempt."""

    __slots__ = ("_crew", "_is_claiming", "_is_taken", "_since")

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._since = crew._loop.time()
        self._is_taken = True
        self._is_claiming = False

    def leave(self, go_on: Callable[[], None]) -> None:
        """The agent has ended; its attempt is finished when `go_on` is called, which may be a little later."""
        if not self._is_taken:
            go_on()
            return
        began, self._since, self._is_taken = self._since, self._crew._loop.time(), False
        self._is_claiming = self._crew.end_agent(self._since - began, go_on)

    @property
    def is_claiming(self) -> bool:
        """Whether to claim the next rollout in the step that finishes the attempt."""
        return self._is_claiming and self._crew.shift.goes_on()

    def close(self, following: Claim | None) -> None:
        """The attempt is finished, and this was claimed then."""
        if self._is_taken:
            self.leave(_nothing)
        if self._is_claiming:
            self._crew.end_attempt(following, self._crew._loop.time() - self._since)


def _nothing() -> None:
    pass
