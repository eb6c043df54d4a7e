"""The table of `Trainer.dev`: one line for each rollout, cut to the width of the terminal."""

from collections.abc import Sequence
from statistics import fmean
from typing import Final, TextIO

from rich import box
from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from agentlightning.trainer.dev_run import Row, one_line
from agentlightning.trainer.outcomes import most_frequent

__all__ = ["print_table"]

NOTHING: Final = "-"


def print_table(rows: Sequence[Row], output: TextIO) -> None:
    """Write the table and a line that sums it up, with the traceback of a failure unless all have failed.

    Where all have failed, the traceback is in the error that is raised.
    """
    terminal = Terminal(file=output)
    terminal.print(_table(rows, is_plain=not terminal.is_terminal))
    failures = [row.failure for row in rows if row.failure is not None]
    rewards = [row.reward for row in rows if row.reward is not None]
    mean = f"mean reward {fmean(rewards):.2f}" if rewards else "no reward"
    count = "1 rollout" if len(rows) == 1 else f"{len(rows)} rollouts"
    terminal.print(Text(f"{count}, {mean}, {len(failures)} failed"))
    if failures and len(failures) < len(rows):
        failure, _, _ = most_frequent(failures)
        terminal.print(Text(f"\n{failure.traceback}".rstrip()), soft_wrap=True)


def _table(rows: Sequence[Row], *, is_plain: bool) -> Table:
    table = Table(box=None if is_plain else box.SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "output"):
        table.add_column(name)
    for name in ("reward", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error")
    for row in rows:
        table.add_row(
            _cell(row.task),
            _cell(row.output or NOTHING),
            NOTHING if row.reward is None else f"{row.reward:.4g}",
            NOTHING if row.seconds is None else f"{row.seconds:.2f} s",
            _cell(_ending(row), "red"),
        )
    return table


def _ending(row: Row) -> str:
    if row.failure is not None:
        return one_line(str(row.failure))
    return "" if row.status == "succeeded" else row.status


def _cell(text: str, style: str = "") -> Text:
    """Cut to the width of its column, which is narrowed until all fit on a line."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
