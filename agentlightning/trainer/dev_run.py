"""What sets `Trainer.dev` apart from `fit`: one worker in the calling process, no learning, and a table at the end."""

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from agentlightning.algorithm import Algorithm, Baseline, FastAlgorithm
from agentlightning.algorithm.fast import DryRun
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import SpansEvicted
from agentlightning.execution import SharedMemoryExecutionStrategy
from agentlightning.runner.failures import FailureLog, FailureNote
from agentlightning.store.base import LightningStore
from agentlightning.trainer.console import ProgressMode
from agentlightning.trainer.outcomes import failure_of, rollouts_since
from agentlightning.types import AttemptedRollout, Rollout, Span
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.daemon_threads import CallingThread

__all__ = ["DevRun", "Row", "dev_algorithm", "one_line"]

logger = logging.getLogger(__name__)

LONGEST_CELL: Final = 1000
"""Characters of a cell before it is cut to the width of the terminal."""
_ANSWER: Final = "gen_ai.completion.0.content"


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


@dataclass(frozen=True)
class Row:
    """One rollout of the table."""

    task: str
    output: str | None
    reward: float | None
    seconds: float | None
    failure: FailureNote | None
    status: str


@dataclass
class DevRun:
    """One call of `Trainer.dev`."""

    progress: ProgressMode
    thread: CallingThread | None
    """Where a plain agent runs; None for a coroutine."""
    strategy: SharedMemoryExecutionStrategy = field(default_factory=SharedMemoryExecutionStrategy)
    rows: list[Row] = field(default_factory=list)

    @property
    def shows_table(self) -> bool:
        word: str = self.progress
        if word == "auto":
            word = resolve_str_env_var(LightningEnvVar.AGL_PROGRESS, fallback="auto").strip().lower()
        return word not in ("off", "json") and sys.stdout is not None

    @property
    def live_progress(self) -> ProgressMode:
        """What is shown while it runs: nothing that would come between a user and the debugger."""
        return "off" if self.shows_table else self.progress

    def failure_log(self) -> FailureLog:
        """Logs failures, but for those that the table will show."""
        return FailureLog(logging.DEBUG if self.shows_table else logging.ERROR)

    async def read(self, store: LightningStore, moment: float) -> None:
        """Take the rollouts since this moment into the table."""
        if not self.shows_table:
            return
        try:
            self.rows = [await _row(store, rollout) for rollout in await rollouts_since(store, moment)]
        except Exception as error:  # noqa: BLE001 # how the run ended matters more
            logger.warning("The table of rollouts cannot be shown: %r.", error)

    def summary(self) -> dict[str, Any]:
        """How it went, for its run in the store."""
        rewards = [row.reward for row in self.rows if row.reward is not None]
        counts = dict(Counter(row.status for row in self.rows))
        return {"rollouts": counts, "reward_mean": fmean(rewards) if rewards else None} if self.rows else {}

    def print(self) -> None:
        """Write the table to standard output, if there is anything in it."""
        if self.rows:
            from agentlightning.trainer.rollout_table import print_table  # loads rich, which takes time

            print_table(self.rows, sys.stdout)


async def _row(store: LightningStore, rollout: AttemptedRollout | Rollout) -> Row:
    try:
        spans = list(await store.query_spans(rollout.rollout_id, "latest"))
    except SpansEvicted:
        spans = []
    begin = rollout.attempt.start_time if isinstance(rollout, AttemptedRollout) else rollout.start_time
    return Row(
        task=one_line(rollout.input),
        output=_output(rollout, spans),
        reward=final_reward_of(spans),
        seconds=None if rollout.end_time is None else rollout.end_time - begin,
        failure=failure_of(rollout) if rollout.status == "failed" else None,
        status=rollout.status,
    )


def _output(rollout: Rollout, spans: Sequence[Span]) -> str | None:
    """What the agent returned besides its reward or, without that, the last answer of a model."""
    returned = getattr(rollout, "output", None)
    if returned is not None:
        return one_line(returned)
    answers = [span.attributes[_ANSWER] for span in spans if span.attributes.get(_ANSWER)]
    return one_line(answers[-1]) if answers else None


def one_line(value: Any) -> str:
    """A value in one line, without anything that a terminal could take for a command."""
    text = (value if isinstance(value, str) else repr(value))[:LONGEST_CELL]
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
