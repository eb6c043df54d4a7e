"""What sets `Trainer.dev` apart from `fit`: one worker in the calling process, no learning, and a table at the end."""

import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from agentlightning.algorithm import Algorithm, Baseline, FastAlgorithm
from agentlightning.algorithm.fast import DryRun
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.execution import SharedMemoryExecutionStrategy
from agentlightning.runner.failures import FailureLog
from agentlightning.store.base import LightningStore
from agentlightning.trainer.outcomes import TableRow, print_table, table_rows
from agentlightning.trainer.views import ProgressMode, dashboard_command
from agentlightning.types import Run
from agentlightning.utils.daemon_threads import CallingThread
from agentlightning.utils.log_failures import log_failures

logger = logging.getLogger(__name__)

_MODEL_VARIABLES: Final = frozenset(["OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"])
"""Where one of these is set, a program probably calls a model."""
_PAST_THE_PROXY: Final = (
    " Its calls are if they go through a proxy; `agl eval URL --model NAME --agent MODULE:AGENT --data FILE` starts "
    "one for the server at URL."
)


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
    address: str | None = None
    """Where the store can be found again; None, if nowhere."""
    program: str | None = None
    """The agent's, if it is one, whose model calls are seen by a proxy alone."""

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

    async def read(self, store: LightningStore, run: Run) -> None:
        """Take the rollouts of its run into the table."""
        if self.shows_table:
            with log_failures(logger, "The table of rollouts cannot be shown", level=logging.WARNING):
                self.rows = await table_rows(store, run)

    def summary(self) -> dict[str, Any]:
        """How it went, for its run in the store."""
        rewards = [row.reward for row in self.rows if row.reward is not None]
        counts = dict(Counter(row.status for row in self.rows))
        return {"rollouts": counts, "reward_mean": fmean(rewards) if rewards else None} if self.rows else {}

    def print(self) -> None:
        """Write the table to standard output, if there is anything in it."""
        if not self.rows:
            return
        print_table(self.rows, sys.stdout)
        if self.program is not None and not any(row.calls for row in self.rows):
            says = "" if not _MODEL_VARIABLES & os.environ.keys() else _PAST_THE_PROXY
            sys.stdout.write(f"No model call of '{self.program}' was recorded.{says}\n")
        if self.address is not None:
            sys.stdout.write(f"look at it: {dashboard_command(self.address)}\n")
