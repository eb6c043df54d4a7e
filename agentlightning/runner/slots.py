"""The slots of a runner: each runs one agent at a time, and claims the next rollout as it finishes the one before.

A slot that has nothing to run is idle. One idle slot at a time waits at the store, and claims for all that are idle, so
that many of them cost no more than one. The id of a claim is the number of its slot and a counter: the same again until
an answer comes, so that a repeat gets what the lost answer gave.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from agentlightning.store.claims import Claim

_T = TypeVar("_T")


class ClaimQueue:
    """How many rollouts a runner may claim, and claims that no slot has taken yet; used in one event loop.

    Args:
        claim: Asks the store for up to so many rollouts for a slot; empty if there are none for now.
        quota: How many may be claimed in all; None sets no limit.
        counter: Numbers the claims of this worker, also those of earlier queues.
        is_claiming: Whether more may be claimed now: not while the runner pauses, or once it stops.
        is_over: Whether nothing more will be claimed.
    """

    def __init__(
        self,
        claim: "Callable[[Slot, int], Awaitable[Sequence[Claim]]]",
        *,
        quota: int | None,
        counter: Iterator[int],
        is_claiming: Callable[[], bool],
        is_over: Callable[[], bool],
    ) -> None:
        self._claim = claim
        self._quota = quota
        """What is left. Below zero when the store gave more than was claimed."""
        self.counter = counter
        self._is_claiming = is_claiming
        self._is_over = is_over
        self.claims: deque[Claim] = deque()
        """Without a slot."""
        self._idle_count = 0
        self._turn = asyncio.Lock()  # of the one slot that waits at the store

    def reserve(self, most: int) -> int:
        """Take up to so many from the quota before they are claimed; what does not come is refunded."""
        count = most if self._quota is None else max(min(most, self._quota), 0)
        self.refund(-count)
        return count

    def refund(self, count: int) -> None:
        """Give back to the quota what was reserved and has not come."""
        if self._quota is not None:
            self._quota += count

    def reserve_next(self) -> bool:
        """Whether a slot that finishes its rollout claims another in the same step."""
        return not self.claims and self._is_claiming() and self.reserve(1) == 1

    async def next_claim(self, slot: "Slot") -> Claim | None:
        """The next rollout of an idle slot, as soon as there is one; None if there will be none."""
        self._idle_count += 1
        try:
            await asyncio.sleep(0)  # until all that have become idle at once are counted
            async with self._turn:
                while not self.claims and not self._is_over() and (count := self.reserve(self._idle_count)):
                    claims: Sequence[Claim] = ()
                    try:
                        claims = await self._claim(slot, count)
                    finally:
                        self.refund(count - len(claims))
                    self.claims.extend(claims)
                return self.claims.popleft() if self.claims else None
        finally:
            self._idle_count -= 1


class Slot:
    """The place of one agent at a time."""

    __slots__ = ("_claim_id", "_number", "queue")

    def __init__(self, number: int, queue: ClaimQueue) -> None:
        self._number = number
        self._claim_id: str | None = None
        self.queue = queue

    @property
    def has_open_claim(self) -> bool:
        """Whether a claim was sent and has no answer: the store may have given something."""
        return self._claim_id is not None

    async def claim(self, send: Callable[[str], Awaitable[_T]]) -> _T:
        """Send a claim under an id that is used again until an answer comes."""
        if self._claim_id is None:
            self._claim_id = f"{self._number}:{next(self.queue.counter)}"
        answer = await send(self._claim_id)
        self._claim_id = None
        return answer

    async def claim_one(self, send: Callable[[str], Awaitable[Claim | None]]) -> Claim | None:
        """Send a claim of one rollout, which was reserved."""
        claim = None
        try:
            claim = await self.claim(send)
        finally:
            self.queue.refund(claim is None)
        return claim
