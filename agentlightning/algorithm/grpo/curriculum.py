"""Which tasks come next: every task once before any comes again, in an order that a checkpoint can go on with."""

import random
from collections.abc import Mapping
from typing import Any

from agentlightning.errors import ConfigurationError
from agentlightning.types import Dataset

__all__ = ["Curriculum"]


class Curriculum:
    """Goes through a data set for ever, shuffled anew each time."""

    def __init__(self, dataset: Dataset[Any], seed: int = 0) -> None:
        if len(dataset) == 0:
            raise ConfigurationError("The training data set is empty; give it at least one task.")
        self._dataset = dataset
        self._seed = seed
        self._passes = 0
        self._position = 0
        self._order = self._shuffled()

    def take(self, count: int) -> list[Any]:
        """The next tasks."""
        taken: list[Any] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._passes += 1
                self._position = 0
                self._order = self._shuffled()
            taken.append(self._dataset[self._order[self._position]])
            self._position += 1
        return taken

    def state(self) -> dict[str, int]:
        """The place of the next task."""
        return {"passes": self._passes, "position": self._position, "size": len(self._dataset), "seed": self._seed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on where another left off; ConfigurationError if that was in another data set."""
        if state["size"] != len(self._dataset):
            raise ConfigurationError(
                f"The checkpoint was made with a training data set of {state['size']} tasks; this one has "
                f"{len(self._dataset)}. Give the same, or begin anew."
            )
        self._seed, self._passes = state["seed"], state["passes"]
        self._order = self._shuffled()
        self._position = state["position"]

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._dataset)))
        random.Random(f"{self._seed}/{self._passes}").shuffle(order)
        return order
