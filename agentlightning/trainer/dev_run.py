"""What sets `Trainer.dev` apart from `fit`: one worker in the calling process, no learning, and a table at the end."""

import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentlightning.algorithm import Algorithm, Baseline, FastAlgorithm
from agentlightning.algorithm.fast import DryRun
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.execution import SharedMemoryExecutionStrategy
from agentlightning.runner.failures import FailureLog
from agentlightning.store.base import LightningStore
from agentlightning.trainer.outcomes import TableRow, print_table, table_rows
from agentlightning.trainer.views import ProgressMode
from agentlightning.utils.daemon_threads import CallingThread
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)


def dev_algorithm(algorithm: Algorithm | None) -> Algorithm:
    """What runs in the place of an algorithm when an agent is only tried."""
    if algorithm is None:
        return Baseline()
    if isinstance(algorithm, FastAlgorithm):
        return algorithm
    if callable(getattr(algorithm, "dev_resources", None)):
        return DryRun(algorithm)
    raise TypeError(
        f"dev does not know what agents run with under a {type(algorithm).__name__}; define dev_resources() on it, "
        "which returns resources by name, or call fit to train."
    )


@dataclass
class DevRun:
    """One call of `Trainer.dev`."""

    progress: ProgressMode
    thread: CallingThread | None
    """Where a plain agent runs; None for a coroutine."""
    strategy: SharedMemoryExecutionStrategy = field(default_factory=SharedMemoryExecutionStrategy)
    rows: list[TableRow] = field(default_factory=list)

    @property
    def shows_table(self) -> bool:
        mode: str = self.progress
        if mode == "auto":
            mode = resolve_str_env_var(LightningEnvVar.AGL_PROGRESS, fallback="auto").strip().lower()
        return mode not in ("off", "json") and sys.stdout is not None

    @property
    def live_progress(self) -> ProgressMode:
        """What is shown while it runs: nothing that would come between a user and the debugger."""
        return "off" if self.shows_table else self.progress

    def failure_log(self) -> FailureLog:
        """Logs failures, but for those that the table will show."""
        return FailureLog(logging.DEBUG if self.shows_table else logging.ERROR)

    async def read(self, store: LightningStore, moment: float) -> None:
        """Take the rollouts since this moment into the table."""
        if self.shows_table:
            with log_failures(logger, "The table of rollouts cannot be shown", level=logging.WARNING):
                self.rows = await table_rows(store, moment)

    def summary(self) -> dict[str, Any]:
        """How it went, for its run in the store."""
        rewards = [row.reward for row in self.rows if row.reward is not None]
        counts = dict(Counter(row.status for row in self.rows))
        return {"rollouts": counts, "reward_mean": fmean(rewards) if rewards else None} if self.rows else {}

    def print(self) -> None:
        """Write the table to standard output, if there is anything in it."""
        if self.rows:
            print_table(self.rows, sys.stdout)
