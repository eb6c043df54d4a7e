"""An optimisation as a run in the store: its curves, and in its summary every candidate with what became of it."""

import math
from collections.abc import Mapping
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.types import RunStatus

__all__ = ["RunRecord"]


class RunRecord:
    """Writes to a run of its own, and its curves also to the trainer's. A store that keeps no runs is left alone.

    Args:
        name: Of the run: that of the algorithm.
    """

    def __init__(self, store: LightningStore, trainer_run_id: str | None, *, name: str) -> None:
        self._store = store
        self._name = name
        self._trainer_run_id = trainer_run_id
        self.run_id: str | None = None

    async def open(self, config: dict[str, Any], run_id: str | None) -> None:
        """Begin the run, or go on with the one of this id."""
        metadata = {} if self._trainer_run_id is None else {"trainer_run_id": self._trainer_run_id}
        try:
            run = await self._store.start_run(self._name, config=config, metadata=metadata, run_id=run_id)
        except NotImplementedError:  # a store of the 0.2 release
            return
        self.run_id = run.run_id

    async def draw(self, step: int, values: Mapping[str, float]) -> None:
        """Add to the curves."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for run_id in (self.run_id, self._trainer_run_id):
            if run_id is not None:
                await self._store.add_metrics(run_id, step, finite)

    async def write(self, status: RunStatus, summary: dict[str, Any]) -> None:
        """Write down how things stand."""
        if self.run_id is not None:
            await self._store.finish_run(self.run_id, status, summary=summary)
