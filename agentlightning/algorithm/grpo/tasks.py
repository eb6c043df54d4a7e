"""Which tasks a training takes next: in a shuffled order, by how hard they are, or as a user's sampler says.

A sampler deals in numbers of tasks and never sees the data set. What it knows is in its state, which is part of every
checkpoint, so a run that is resumed takes the tasks that it would have taken.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentlightning.algorithm.batches import FinishedRollout
from agentlightning.algorithm.grpo.advantages import are_same
from agentlightning.errors import ConfigurationError
from agentlightning.types import Dataset
from agentlightning.utils.json_values import JsonObject


class TaskSampler(Protocol):
    """Chooses the tasks of each step."""

    def begin(self, size: int, seed: int) -> None:
        """A training with a data set of `size` tasks begins; nothing of an earlier one is left."""

    def take(self, count: int) -> Sequence[int]:
        """The numbers of the next `count` tasks, from 0; one may come several times."""

    def observe(self, finished: Mapping[int, Sequence[FinishedRollout]]) -> None:
        """See what became of the tasks of a step: their rollouts by the number of the task."""

    def state(self) -> JsonObject:
        """All that `take` depends on, as JSON."""

    def load_state(self, state: JsonObject) -> None:
        """Go on from a state of the same sampler; called after `begin`."""


@dataclass
class ShuffledTasks:
    """Goes through the data set for ever, shuffled anew each time."""

    _size: int = field(default=0, init=False, repr=False)
    _seed: int = field(default=0, init=False, repr=False)
    _passes: int = field(default=0, init=False, repr=False)
    _position: int = field(default=0, init=False, repr=False)
    _order: list[int] = field(default_factory=list, init=False, repr=False)

    def begin(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._begin_pass(0)

    def _begin_pass(self, number: int) -> None:
        self._passes, self._position = number, 0
        self._order = list(range(self._size))
        random.Random(f"{self._seed}/{number}").shuffle(self._order)

    def take(self, count: int) -> Sequence[int]:
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        if self._position == self._size:
            self._begin_pass(self._passes + 1)
        self._position += 1
        return self._order[self._position - 1]

    def observe(self, finished: Mapping[int, Sequence[FinishedRollout]]) -> None:
        """Nothing: the order does not depend on what became of tasks."""

    def state(self) -> JsonObject:
        return {"passes": self._passes, "position": self._position, "seed": self._seed}

    def load_state(self, state: JsonObject) -> None:
        self._seed = state["seed"]
        self._begin_pass(state["passes"])
        self._position = state["position"]


@dataclass
class DifficultySampler(ShuffledTasks):
    """Goes through the data set likewise, and leaves out for some passes what teaches nothing.

    A task that was solved in every rollout rests for one pass, then for 2, 4, … up to `longest_rest`; one that was
    solved in none, or in which every rollout failed, for up to `longest_wait`. As soon as its rewards differ it comes
    in every pass again. Solved is the highest reward that was seen, and not solved the lowest.
    """

    longest_rest: int = 8
    longest_wait: int = 4
    _rests: dict[int, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)
    """By task: how many passes its last rest had, and how many of these are left."""
    _seen: tuple[float, float] | None = field(default=None, init=False, repr=False)
    """The lowest and the highest reward so far."""

    def __post_init__(self) -> None:
        if min(self.longest_rest, self.longest_wait) < 1:
            raise ConfigurationError(
                f"longest_rest is {self.longest_rest} and longest_wait is {self.longest_wait}; give at least one pass."
            )

    def begin(self, size: int, seed: int) -> None:
        self._rests, self._seen = {}, None
        super().begin(size, seed)

    def _next(self) -> int:
        while True:
            task = super()._next()
            length, left = self._rests.get(task, (0, 0))
            if left == 0:
                return task
            self._rests[task] = length, left - 1

    def observe(self, finished: Mapping[int, Sequence[FinishedRollout]]) -> None:
        rewards_by_task = {
            task: [one.own_reward for one in rollouts if one.own_reward is not None]
            for task, rollouts in finished.items()
        }
        known = [*(self._seen or ()), *(reward for rewards in rewards_by_task.values() for reward in rewards)]
        self._seen = (min(known), max(known)) if known else None
        for task, rewards in rewards_by_task.items():
            longest = self._longest_rest_of(rewards)
            length = min(longest, 2 * self._rests.get(task, (0, 0))[0] or 1)
            self._rests[task] = length, length

    def _longest_rest_of(self, rewards: Sequence[float]) -> int:
        """How long a task with these rewards may rest; 0 if it teaches something."""
        low, high = min(rewards, default=0.0), max(rewards, default=0.0)
        if not rewards or self._seen is None:
            return self.longest_wait
        if not are_same(low, high):
            return 0
        lowest, highest = self._seen
        if are_same(lowest, highest):  # then 1 is solved, and 0 is not
            lowest, highest = min(0.0, lowest), max(1.0, highest)
        return self.longest_rest if are_same(high, highest) else self.longest_wait if are_same(lowest, low) else 0

    def state(self) -> JsonObject:
        rests = [[task, *rest] for task, rest in self._rests.items() if rest != (0, 0)]
        return {**super().state(), "rests": rests, "seen": list(self._seen or ())}

    def load_state(self, state: JsonObject) -> None:
        super().load_state(state)
        self._rests = {task: (length, left) for task, length, left in state.get("rests", ())}
        seen = state.get("seen")
        self._seen = (seen[0], seen[1]) if seen else None


class Curriculum:
    """The tasks of a data set in the order of a sampler, which is the shuffled one unless the user gives another."""

    def __init__(self, dataset: Dataset[Any], seed: int = 0, sampler: TaskSampler | None = None) -> None:
        if len(dataset) == 0:
            raise ConfigurationError("The training data set is empty; give it at least one task.")
        self._dataset = dataset
        self._sampler = sampler or ShuffledTasks()
        self._sampler.begin(len(dataset), seed)
        self._open: list[int] = []
        """Numbers of tasks that were taken and not learned from, in that order."""
        self._again: list[int] = []
        """Those of the run that this one goes on with, which come first."""

    def take(self, count: int) -> list[tuple[int, Any]]:
        """The next tasks, each with its number."""
        again, self._again = self._again[:count], self._again[count:]
        new = list(self._sampler.take(count - len(again)))
        if len(again) + len(new) != count or not all(0 <= number < len(self._dataset) for number in new):
            raise ConfigurationError(
                f"{type(self._sampler).__name__}.take({count - len(again)}) returned {new}; return so many numbers of "
                f"tasks, from 0 to {len(self._dataset) - 1}."
            )
        self._open += [*again, *new]
        return [(number, self._dataset[number]) for number in [*again, *new]]

    def observe(self, finished: Sequence[FinishedRollout], number_of_group: Mapping[str, int]) -> None:
        """The tasks of these groups are over; the sampler sees what became of them."""
        by_task: dict[int, list[FinishedRollout]] = {}
        for one in finished:
            by_task.setdefault(number_of_group[one.group], []).append(one)
        for number in number_of_group.values():
            self._open.remove(number)
        self._sampler.observe(by_task)

    def state(self) -> JsonObject:
        """The place of the next task, and the tasks that are still open."""
        return {**self._sampler.state(), "size": len(self._dataset), "open": [*self._open, *self._again]}

    def load_state(self, state: JsonObject) -> None:
        """Go on where another left off; ConfigurationError if that was in another data set."""
        if state["size"] != len(self._dataset):
            raise ConfigurationError(
                f"The checkpoint was made with a training data set of {state['size']} tasks; this one has "
                f"{len(self._dataset)}. Give the same, or begin anew."
            )
        self._sampler.load_state(state)
        self._open, self._again = [], list(state.get("open", ()))
