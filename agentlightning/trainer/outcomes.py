"""Outcomes of a training: the error of one in which every rollout failed; and `Trainer.dev`, with its table.

`dev` is a training with one worker in the calling process that learns nothing, and shows a table at its end.
"""

import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, TextIO

from agentlightning.algorithm import Algorithm, Baseline, FastAlgorithm
from agentlightning.algorithm.fast import DryRun
from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import SpansEvicted, TrainingError
from agentlightning.execution import SharedMemoryExecutionStrategy
from agentlightning.logging import printable
from agentlightning.runner.failures import FailureLog, FailureNote
from agentlightning.store.base import LightningStore
from agentlightning.trainer.views import ProgressMode, dashboard_command
from agentlightning.types import AttemptedRollout, Rollout, Run, Span
from agentlightning.types.rewards import final_reward_of
from agentlightning.utils.daemon_threads import CallingThread
from agentlightning.utils.log_failures import log_failures
from agentlightning.verdict.evidence import rollouts_of

logger = logging.getLogger(__name__)

LONGEST_LINE: Final = 500
"""Characters of a failure's message before its traceback."""
_ANSWER: Final = "gen_ai.completion.0.content"
_NOTHING: Final = "-"
_MODEL_VARIABLES: Final = frozenset(["OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"])
"""Where one of these is set, a program probably calls a model."""
_PAST_THE_PROXY: Final = (
    " Its calls are if they go through a proxy; `agl eval URL --model NAME --agent MODULE:AGENT --data FILE` starts "
    "one for the server at URL."
)


async def failure_of_all(store: LightningStore, run: Run) -> TrainingError | None:
    """What to raise if every rollout of a run failed; None if one did not, or there is none."""
    failed: list[FailureNote] = []
    async for rollout in rollouts_of(store, run):
        if rollout.status == "failed":
            failed.append(_failure_of(rollout))
        elif rollout.status != "cancelled":
            return None
    if not failed:
        return None
    failure, count, n_other_kinds = _most_frequent(failed[::-1])
    line = str(failure).partition("\n")[0][:LONGEST_LINE]
    text = f"{len(failed)} of {len(failed)} rollouts failed"
    text += (
        f", {count} of them with {line}, the rest with {n_other_kinds} other errors"
        if n_other_kinds
        else f" with {line}"
    )
    has_frames = '  File "' in failure.traceback  # without any it would say the same again
    return TrainingError(f"{text}\n\n{failure.traceback}".strip() if has_frames else text)


def _failure_of(rollout: AttemptedRollout | Rollout) -> FailureNote:
    """Why a rollout failed, as far as its last attempt says."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    noted = None if attempt is None else FailureNote.read(attempt.metadata)
    return noted or FailureNote("the attempt", f"'{rollout.status if attempt is None else attempt.status}'", "")


def _most_frequent(failures: Sequence[FailureNote]) -> tuple[FailureNote, int, int]:
    """The first failure of the most frequent kind, how many there are of it, and how many other kinds there are."""
    counts = Counter(failure.kind for failure in failures)
    kind, count = counts.most_common(1)[0]
    return next(failure for failure in failures if failure.kind == kind), count, len(counts) - 1


# ---------------------------------------------------------------------- the table of `dev`


@dataclass(frozen=True)
class TableRow:
    """One rollout."""

    task: str
    output: str | None
    reward: float | None
    seconds: float | None
    failure: FailureNote | None
    status: str
    calls: int = 0
    """Model calls that were recorded."""


async def table_rows(store: LightningStore, run: Run) -> list[TableRow]:
    """The rollouts of a run, in the order of their creation."""
    newest_first = [rollout async for rollout in rollouts_of(store, run)]
    return [await _table_row(store, rollout) for rollout in newest_first[::-1]]


async def _table_row(store: LightningStore, rollout: AttemptedRollout | Rollout) -> TableRow:
    spans: Sequence[Span] = []
    with suppress(SpansEvicted):
        spans = list(await store.query_spans(rollout.rollout_id, "latest"))
    begin = rollout.attempt.start_time if isinstance(rollout, AttemptedRollout) else rollout.start_time
    # What the agent returned besides its reward or, without that, the last answer of a model.
    output = getattr(rollout, "output", None)
    if output is None:
        output = next((span.attributes[_ANSWER] for span in reversed(spans) if span.attributes.get(_ANSWER)), None)
    return TableRow(
        task=_one_line(rollout.input),
        output=None if output is None else _one_line(output),
        reward=final_reward_of(spans),
        seconds=None if rollout.end_time is None else rollout.end_time - begin,
        failure=_failure_of(rollout) if rollout.status == "failed" else None,
        status=rollout.status,
        calls=sum(any(name.startswith("gen_ai.") for name in span.attributes) for span in spans),
    )


def _one_line(value: object) -> str:
    """A value in one line, without anything that a terminal could take for a command."""
    # A cell is shortened before it is cut to the width of the terminal.
    text = (value if isinstance(value, str) else repr(value))[:1000]
    return " ".join(printable(text).split())


def finite_rewards(rows: Sequence[TableRow]) -> list[float]:
    """The rewards that have a mean."""
    return [row.reward for row in rows if row.reward is not None and math.isfinite(row.reward)]


def print_table(rows: Sequence[TableRow], output: TextIO) -> None:
    """Write a line for each rollout, cut to the width of the terminal, and one that sums them up.

    The traceback of a failure follows, unless all have failed: then it is in the error that is raised.
    """
    from rich import box  # takes time to load
    from rich.console import Console as Terminal
    from rich.table import Table
    from rich.text import Text

    def cell(text: str, style: str = "") -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    terminal = Terminal(file=output)
    table = Table(box=box.SIMPLE_HEAD if terminal.is_terminal else None, pad_edge=False)
    for name in ("task", "output", "reward", "time", "error"):
        is_number = name in ("reward", "time")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        ending = "" if row.status == "succeeded" else row.status
        table.add_row(
            cell(row.task),
            cell(row.output or _NOTHING),
            _NOTHING if row.reward is None else f"{row.reward:.4g}",
            _NOTHING if row.seconds is None else f"{row.seconds:.2f} s",
            cell(ending if row.failure is None else _one_line(str(row.failure)), "red"),
        )
    terminal.print(table)
    failures = [row.failure for row in rows if row.failure is not None]
    rewards = finite_rewards(rows)
    mean = f"mean reward {fmean(rewards):.2f}" if rewards else "no reward"
    mean += f" of {len(rewards)}" if 0 < len(rewards) < len(rows) else ""
    terminal.print(Text(f"{len(rows)} rollout{'s' if len(rows) > 1 else ''}, {mean}, {len(failures)} failed"))
    if not rewards and len(failures) < len(rows):
        terminal.print("To give a reward, return a number from the agent, or call agl.emit_reward in it.")
    if failures and len(failures) < len(rows):
        terminal.print(Text(f"\n{_most_frequent(failures)[0].traceback}".rstrip()), soft_wrap=True)


# ---------------------------------------------------------------------- one call of `dev`


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
        rewards = finite_rewards(self.rows)
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
