"""A training on a terminal: a few rows while it runs, a table at its end."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from agentlightning.trainer.bottom_rows import BottomRows, write_at_once
from agentlightning.trainer.progress import Figures
from agentlightning.trainer.views import View, duration, look_command

__all__ = ["TerminalView", "live_lines", "sparkline", "summary_table"]

BAR_WIDTH: Final = 24
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_STYLES: Final = {
    "queuing": "dim",
    "requeuing": "yellow",
    "preparing": "cyan",
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
}
_UNITS: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


class TerminalView(View):
    """Draws with rich; on an output that is no terminal, only the table comes."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self._terminal = terminal
        self._name = name
        self._rows = BottomRows(terminal.file)
        self._is_live = terminal.is_terminal and not terminal.is_dumb_terminal and not terminal.legacy_windows

    def show(self, figures: Figures) -> None:
        if self._is_live:
            lines = [self._drawn(line) for line in live_lines(self._name, figures)]
            self._rows.draw(lines, self._terminal.size.height)

    def close(self) -> None:
        self._rows.close()

    def finish(self, figures: Figures, address: str | None) -> None:
        self.close()
        with self._terminal.capture() as capture:
            self._terminal.print(summary_table(self._name, figures))
            if address is not None:
                self._terminal.print(Text(f"store: {address}"), soft_wrap=True)
                self._terminal.print(Text(f"look at it again: {look_command(address)}"), soft_wrap=True)
        write_at_once(self._terminal.file, capture.get())

    def _drawn(self, line: Text) -> str:
        """A line with its colours, cut to the screen."""
        with self._terminal.capture() as capture:
            self._terminal.print(line, no_wrap=True, overflow="ellipsis", crop=True, end="", highlight=False)
        return capture.get()


def live_lines(name: str, figures: Figures) -> list[Text]:
    """What is shown while a training runs."""
    eta = f"   ETA {duration(figures.eta_seconds)}" if figures.eta_seconds is not None else ""
    head = Text.assemble((f"── {name} ", "bold"), f"  {duration(figures.elapsed_seconds)}{eta}")
    lines = [head, _rollout_line(figures), _reward_line(figures)]
    if figures.errors:
        lines.append(Text.assemble(_label("errors"), (str(figures.errors), "red")))
        lines += [Text.assemble(_label(""), (f"{one.rollout_id}  ", "dim"), one.message) for one in figures.failures]
    return lines


def _rollout_line(figures: Figures) -> Text:
    done = round(BAR_WIDTH * figures.finished / figures.total) if figures.total else 0
    line = Text.assemble(_label("rollouts"), ("━" * done, "green"), ("─" * (BAR_WIDTH - done), "dim"))
    line.append(f" {figures.finished}/{figures.total}")
    for status, count in figures.rollouts.items():
        line.append(f"   {count} {status}", style=_STYLES.get(status, ""))
    return line


def _reward_line(figures: Figures) -> Text:
    about = "~" if figures.is_estimate else ""
    line = Text.assemble(_label("reward"))
    if figures.reward_mean is None:
        line.append("none yet", style="dim")
    else:
        line.append(sparkline(figures.curve), style="magenta")
        line.append(f" mean {about}{figures.reward_mean:.4g}   last {figures.reward_last:.4g}")
    if figures.tokens:
        line.append(f"   {about}{_amount(figures.tokens_per_second)} tokens/s ({about}{_amount(figures.tokens)})")
    return line


def summary_table(name: str, figures: Figures) -> Table:
    """How a training went."""
    about = "~" if figures.is_estimate else ""
    table = Table(title=Text(name), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    by_status = ", ".join(f"{count} {status}" for status, count in figures.rollouts.items())
    table.add_row("rollouts", Text(by_status or "none"))
    if figures.reward_mean is not None:
        table.add_row("mean reward", f"{about}{figures.reward_mean:.4g}  {sparkline(figures.curve)}")
        table.add_row("last reward", f"{figures.reward_last:.4g}")
    table.add_row("tokens", f"{about}{figures.tokens:,}")
    table.add_row("seconds", f"{figures.elapsed_seconds:.1f}")
    table.add_row("errors", str(figures.errors))
    for failure in figures.failures:
        table.add_row("", Text(f"{failure.rollout_id}  {failure.message}"))
    return table


def sparkline(points: Sequence[float]) -> str:
    """A small curve between its own lowest and highest point; a level one is low if it is zero, else in the middle."""
    if not points:
        return ""
    low, high = min(points), max(points)
    if high == low:
        return _BLOCKS[len(_BLOCKS) // 2 if high > 0 else 0] * len(points)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(steps * ((point - low) / (high - low)))] for point in points)


def _label(word: str) -> tuple[str, str]:
    return (f"   {word:<9}", "bold")


def _amount(number: float) -> str:
    """A number short enough for a line: `12.3k`."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
