"""The rollouts of coming steps: sent ahead, waited for, and handed out in whole groups, first come, first learned.

A step takes the groups that are complete. Where no more are under way than it takes, these are the groups that were
sent for it; where rollouts run ahead, a straggler holds up no step, and its group is part of a later one. Every group
is handed out once, in the order of sending. A task counts as open until its group was learned from, so a run that is
resumed takes it again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentlightning.algorithm.batches import Batches, FinishedRollout, Sent
from agentlightning.algorithm.grpo.tasks import Curriculum

CHECK_SECONDS = 1.0
"""How often it is checked that there are engines, while rollouts are waited for."""


@dataclass(frozen=True, eq=False)
class _Group:
    """The rollouts of one task that are under way."""

    number: int
    """Of the task."""
    sent: Sent
    work: "asyncio.Task[list[FinishedRollout]]"


class StepRollouts:
    """Rollouts of one training.

    Args:
        curriculum: Gives the tasks, and learns what became of them.
        copies: Rollouts of each task.
        resources_id: What they run with.
        check: Raises if nothing can answer the calls of rollouts any more.
    """

    def __init__(
        self, batches: Batches, curriculum: Curriculum, *, copies: int, resources_id: str, check: Callable[[], None]
    ) -> None:
        self.curriculum = curriculum
        self._batches = batches
        self._copies, self._resources_id, self._check = copies, resources_id, check
        self._groups: dict[str, _Group] = {}
        """In the order of sending."""
        self._numbers: dict[str, int] = {}
        """Of the tasks of groups that were handed out, and not learned from yet."""

    @property
    def under_way(self) -> int:
        """Groups that were sent and not handed out."""
        return len(self._groups)

    async def send(self, count: int, step: int) -> None:
        """Send the next tasks for a step."""
        tasks = self.curriculum.take(count)
        sent = await self._batches.send(
            [task for _, task in tasks],
            copies=self._copies,
            resources_id=self._resources_id,
            metadata={"step": step},
        )
        members: dict[str, Sent] = {}
        for rollout_id, group in sent.group_of.items():
            members.setdefault(group, Sent()).group_of[rollout_id] = group
        for (number, _), (group, own) in zip(tasks, members.items(), strict=True):
            work = asyncio.create_task(self._batches.gather(own), name=f"grpo-{group}")
            self._groups[group] = _Group(number, own, work)

    async def take(self, count: int) -> list[FinishedRollout]:
        """Wait until so many groups are complete; their rollouts."""
        while len(done := [name for name, group in self._groups.items() if group.work.done()]) < count:
            waiting = [group.work for group in self._groups.values() if not group.work.done()]
            await asyncio.wait(waiting, timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(self._check)
        taken = {name: self._groups.pop(name) for name in done[:count]}
        self._numbers |= {name: group.number for name, group in taken.items()}
        return [one for group in taken.values() for one in group.work.result()]

    def learned(self, finished: Sequence[FinishedRollout]) -> None:
        """What was handed out was learned from, or taught nothing."""
        self.curriculum.observe(finished, self._numbers)
        self._numbers.clear()

    async def gather(self, sent: Sent) -> list[FinishedRollout]:
        """Wait for other rollouts, as long as there are engines to answer their calls."""
        work = asyncio.create_task(self._batches.gather(sent), name="grpo-rollouts")
        try:
            while not work.done():
                await asyncio.wait([work], timeout=CHECK_SECONDS)
                await asyncio.to_thread(self._check)
            return work.result()
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])

    async def withdraw(self) -> None:
        """Nobody waits for the rollouts that are still under way."""
        groups = list(self._groups.values())
        for group in groups:
            group.work.cancel()
        await asyncio.gather(*(group.work for group in groups), return_exceptions=True)
        await self._batches.withdraw(one for group in groups for one in group.sent.group_of)
        self._groups.clear()
