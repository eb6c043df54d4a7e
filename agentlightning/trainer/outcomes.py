"""Outcomes of a training: the table of `Trainer.dev`, and the error of a training in which every rollout failed."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Final, TextIO

from agentlightning.errors import SpansEvicted, TrainingError
from agentlightning.logging import printable
from agentlightning.runner.failures import FailureNote
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, Rollout, Run, Span
from agentlightning.types.rewards import final_reward_of
from agentlightning.verdict.evidence import rollouts_of

LONGEST_LINE: Final = 500
"""Characters of a failure's message before its traceback."""
LONGEST_CELL: Final = 1000
"""Characters of a cell before it is cut to the width of the terminal."""
_ANSWER: Final = "gen_ai.completion.0.content"
_NOTHING: Final = "-"


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
    text = (value if isinstance(value, str) else repr(value))[:LONGEST_CELL]
    return " ".join(printable(text).split())


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
    rewards = [row.reward for row in rows if row.reward is not None]
    mean = f"mean reward {fmean(rewards):.2f}" if rewards else "no reward"
    mean += f" of {len(rewards)}" if 0 < len(rewards) < len(rows) else ""
    terminal.print(Text(f"{len(rows)} rollout{'s' if len(rows) > 1 else ''}, {mean}, {len(failures)} failed"))
    if not rewards and len(failures) < len(rows):
        terminal.print("To give a reward, return a number from the agent, or call agl.emit_reward in it.")
    if failures and len(failures) < len(rows):
        terminal.print(Text(f"\n{_most_frequent(failures)[0].traceback}".rstrip()), soft_wrap=True)
