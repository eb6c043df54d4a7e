"""How a training is shown: rows at the bottom of a terminal, plain lines elsewhere, or JSON events for machines.

`JsonView` writes one object a line. Every object has `event`, `time` (seconds since 1970) and `name` (of the training):

- `progress`, about once a second: the fields of `Figures`, without the curve and the failures;
- `rollout`, for a rollout that is finished: the fields of `Sample`;
- `error`, for an attempt that failed: the fields of `AttemptFailure`;
- `metrics`, for what the algorithm added to its run: `step`, `values`;
- `message`, for what the algorithm or its engine has to say: `text`;
- `summary`, last: as `progress`, and `store` and `command`, null if the store does not outlast the program.

Where they come faster than they are read, `rollout`, `error` and `metrics` come for some of them; `progress` counts
all rollouts.
"""

import atexit
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TextIO, get_args

from agentlightning.env_var import LightningEnvVar, resolve_str_env_var
from agentlightning.errors import ConfigurationError
from agentlightning.logging import printable
from agentlightning.types import MetricPoint
from agentlightning.utils.clipped_text import counted
from agentlightning.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.text import Text

__all__ = [
    "AttemptFailure",
    "Figures",
    "JsonView",
    "LineView",
    "ProgressMode",
    "Sample",
    "TerminalView",
    "View",
    "main_figures",
    "resolved_mode",
    "view_for",
]

ProgressMode = Literal["auto", "rich", "plain", "json", "off"]

PROGRESS_SECONDS: Final = 1.0
"""Least time between two `progress` events."""
BAR_WIDTH: Final = 24
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_STYLES: Final = {"queuing": "dim", "succeeded": "green", "failed": "red", "requeuing": "yellow", "cancelled": "yellow"}
_MAIN_WORDS: Final = ("reward", "score", "accuracy")
"""Names, or parts of names, of the metrics that matter most."""


@dataclass(frozen=True)
class Sample:
    """Result of one finished rollout, from its spans."""

    rollout_id: str
    status: str
    reward: float | None
    """None if there is none, or none that is a finite number."""
    tokens: int


@dataclass(frozen=True)
class AttemptFailure:
    """Error of one attempt, in a line."""

    rollout_id: str
    attempt_id: str
    message: str


@dataclass(frozen=True)
class Figures:
    """Where a training stands at one moment."""

    seconds: float
    """Since it began."""
    rollouts: Mapping[str, int]
    """By status, in the order of a rollout's life; those that none has are left out."""
    finished: int
    total: int
    reward_mean: float | None
    reward_last: float | None
    tokens: int
    tokens_per_second: float
    errors: int
    """Attempts that failed, including those that were tried again."""
    eta_seconds: float | None
    """Until what is enqueued will be finished; None if unknown."""
    is_estimate: bool
    """Whether rewards and tokens are of some of the finished rollouts, not of all."""
    curve: Sequence[float] = ()
    """The last rewards that were read."""
    failures: Sequence[AttemptFailure] = ()
    """The last few errors that were read."""


class View:
    """Shows a training. The console calls it a few times a second, never from two threads at once."""

    def __init__(self, output: TextIO, name: str) -> None:
        self._output = output
        self._name = name

    def begin(self, run_id: str | None, address: str | None) -> None:
        """A training begins; its store can be looked at under the address meanwhile."""

    def add(self, record: Sample | AttemptFailure | MetricPoint) -> None:
        """A finished rollout or a failed attempt was read, or the algorithm has added figures to its run."""

    def show(self, figures: Figures) -> None:
        """Show where the training stands."""

    def close(self) -> None:
        """Leave the output as it was found."""

    def finish(self, figures: Figures, address: str | None) -> None:
        """Show how the training went, and where its store is if that outlasts the program."""

    def announce(self, text: str) -> None:
        """Show what the algorithm or its engine has to say."""
        for line in text.splitlines():
            self._write(printable(f"{self._name}  {line}") + "\n")

    def conclude(self, verdict: Verdict, *, has_steps: bool) -> None:
        """Say what was gained, or why nothing was; of a run with steps also why that cannot be told. Shown last."""
        if has_steps or verdict.outcome != "unknown":
            self.announce(str(verdict))

    def _write(self, text: str) -> None:
        """Write at once; characters that the output cannot encode become question marks."""
        encoding = getattr(self._output, "encoding", None) or "utf-8"
        self._output.write(text.encode(encoding, "replace").decode(encoding))
        self._output.flush()


class JsonView(View):
    """Writes events as lines."""

    _shown_seconds = -PROGRESS_SECONDS

    def add(self, record: Sample | AttemptFailure | MetricPoint) -> None:
        if isinstance(record, MetricPoint):
            self._event("metrics", {"step": record.step, "values": record.values})
        else:
            self._event("rollout" if isinstance(record, Sample) else "error", asdict(record))

    def show(self, figures: Figures) -> None:
        if figures.seconds - self._shown_seconds >= PROGRESS_SECONDS:
            self._shown_seconds = figures.seconds
            self._event("progress", self._fields(figures))

    def finish(self, figures: Figures, address: str | None) -> None:
        command = None if address is None else dashboard_command(address)
        self._event("summary", {**self._fields(figures), "store": address, "command": command})

    def announce(self, text: str) -> None:
        self._event("message", {"text": text})

    def conclude(self, verdict: Verdict, *, has_steps: bool) -> None:
        self._event("verdict", verdict.as_summary())

    @staticmethod
    def _fields(figures: Figures) -> dict[str, object]:
        return {name: value for name, value in asdict(figures).items() if name not in ("curve", "failures")}

    def _event(self, event: str, fields: Mapping[str, object]) -> None:
        self._write(json.dumps({"event": event, "time": round(time.time(), 3), "name": self._name, **fields}) + "\n")


# ---------------------------------------------------------------------- plain lines


class LineView(View):
    """Writes one line at the start, one a step, and one at the end.

    A step is what the algorithm adds metrics for. While there are none, a line comes every ten seconds in which
    rollouts finish; once there are some, every minute, for steps that take long.
    """

    def __init__(self, output: TextIO, name: str) -> None:
        super().__init__(output, name)
        self._points: list[MetricPoint] = []
        """Steps that are not written yet."""
        self._step_time: float | None = None
        """When the last step ended, by the store's clock; None before the first."""
        self._began = time.time()
        self._written_seconds = 0.0
        self._written_finished = self._written_errors = self._step_finished = 0
        """What the last line counted, and the last step."""

    def begin(self, run_id: str | None, address: str | None) -> None:
        run = "" if run_id is None else f"  run {run_id}"
        where = "in memory" if address is None else f"{address}  look at it: {dashboard_command(address)}"
        self._line(f"0:00{run}  store {where}")

    def add(self, record: Sample | AttemptFailure | MetricPoint) -> None:
        if isinstance(record, MetricPoint):
            self._points.append(record)

    def show(self, figures: Figures) -> None:
        self._write_steps(figures)
        quiet_seconds = figures.seconds - self._written_seconds
        has_changed = figures.finished != self._written_finished or figures.errors != self._written_errors
        # Without metrics a line comes every ten seconds at most; with them each minute, though the step is not over.
        if has_changed and quiet_seconds >= (10.0 if self._step_time is None else 60.0):
            self._write_counts(figures, f"{figures.finished}/{figures.total} rollouts", *_mean_reward(figures))

    def finish(self, figures: Figures, address: str | None) -> None:
        self._write_steps(figures)
        self._written_errors = 0  # the last line counts all of them
        look = [] if address is None else [f"look at it again: {dashboard_command(address)}"]
        counts = ", ".join(f"{count} {status}" for status, count in figures.rollouts.items()) or "none"
        self._write_counts(figures, "ended", f"rollouts: {counts}", *_mean_reward(figures), last=look)

    def _write_steps(self, figures: Figures) -> None:
        points, self._points = self._points, []
        for point in points:
            seconds = max(0.0, point.time - (self._step_time or self._began))
            finished = figures.finished - self._step_finished
            self._step_time, self._step_finished = point.time, figures.finished
            named = [f"{name} {value:.4g}" for name, value in main_figures(point.values).items()]
            count = f"{counted(finished, 'rollout')} in " if finished > 0 else ""
            self._write_counts(figures, f"step {point.step}", *named, f"{count}{seconds:.1f} s")

    def _write_counts(self, figures: Figures, *parts: str, last: Sequence[str] = ()) -> None:
        """A line that counts the errors since the one before."""
        errors = figures.errors - self._written_errors
        failed = [counted(errors, "error")] if errors else []
        self._written_seconds = figures.seconds
        self._written_finished, self._written_errors = figures.finished, figures.errors
        self._line("  ".join([_duration(figures.seconds), *parts, *failed, *last]))

    def _line(self, text: str) -> None:
        self._write(printable(f"{self._name}  {text}") + "\n")


def main_figures(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a line has room for, in this order: `reward/mean`, `learner/loss`, what was skipped, others."""

    def rank(name: str) -> int:
        words = name.lower().split("/")
        if not set(_MAIN_WORDS).isdisjoint(words):
            return 0
        if "loss" in words:
            return 1
        if words[0] == "skipped":  # why a step learned less, or nothing
            return 2
        return 3 if any(main in words[-1] for main in _MAIN_WORDS) else 4

    names = [name for name in values if values[name] or not name.startswith("skipped/")]  # a zero says nothing there
    # A line names four metrics of a step.
    return {name: values[name] for name in sorted(names, key=rank)[:4]}


# ---------------------------------------------------------------------- a terminal


class TerminalView(View):
    """Draws a few rows while the training runs, and prints them at its end; without a terminal, only then.

    The rows are outside of the terminal's scrolling region, so that output of other processes, which `rich.live` would
    overwrite, scrolls above them. A program that is killed leaves the region behind, which `reset` in the shell undoes.
    """

    def __init__(self, terminal: "Terminal", name: str) -> None:
        super().__init__(terminal.file, name)  # type: ignore[arg-type] # rich names it IO[str]
        self._terminal = terminal
        self._is_live = terminal.is_terminal and not terminal.is_dumb_terminal and not terminal.legacy_windows
        self._rows = self._screen_rows = 0

    def show(self, figures: Figures) -> None:
        screen_rows = self._terminal.size.height
        # A terminal with fewer rows has none to spare, and nothing is drawn.
        if not self._is_live or screen_rows < 12:
            self.close()
            return
        lines = []
        for line in _live_lines(self._name, figures):
            with self._terminal.capture() as capture:
                self._terminal.print(line, no_wrap=True, overflow="ellipsis", crop=True, end="", highlight=False)
            lines.append(capture.get())
        count = max(len(lines), self._rows)
        if (count, screen_rows) != (self._rows, self._screen_rows):
            self.close()
            atexit.register(self.close)
            self._rows, self._screen_rows = count, screen_rows
            # Going down scrolls what is in the way; going up leaves the cursor above the rows. Setting the region moves
            # the cursor, hence the saving.
            self._write("\x1bD" * count + f"\x1b[{count}A\x1b7\x1b[1;{screen_rows - count}r\x1b8")
        first = screen_rows - count + 1
        self._write("\x1b7" + "".join(f"\x1b[{first + n};1H\x1b[2K{line}" for n, line in enumerate(lines)) + "\x1b8")

    def close(self) -> None:
        """Give the rows back, empty; the cursor stays where it is."""
        if self._rows:
            self._rows = 0
            self._write("\x1b7\x1b[r\x1b8\x1b[J")
            atexit.unregister(self.close)

    def finish(self, figures: Figures, address: str | None) -> None:
        self.close()
        with self._terminal.capture() as capture:
            for line in _live_lines(self._name, figures):
                self._terminal.print(line, highlight=False)
            if address is not None:
                where = f"store: {address}\nlook at it again: {dashboard_command(address)}"
                self._terminal.print(where, soft_wrap=True, markup=False, highlight=False)
        self._write(capture.get())


def _live_lines(name: str, figures: Figures) -> "list[Text]":
    from rich.text import Text

    def labelled(label: str, *parts: str | tuple[str, str]) -> Text:
        return Text.assemble((f"   {label:<9}", "bold"), *parts)

    eta = "" if figures.eta_seconds is None else f"   ETA {_duration(figures.eta_seconds)}"
    done = round(BAR_WIDTH * figures.finished / figures.total) if figures.total else 0
    bar = (("━" * done, "green"), ("─" * (BAR_WIDTH - done), "dim"), f" {figures.finished}/{figures.total}")
    counts = [(f"   {count} {status}", _STYLES.get(status, "cyan")) for status, count in figures.rollouts.items()]
    about = "~" if figures.is_estimate else ""
    reward: list[str | tuple[str, str]] = [("none yet", "dim")]
    if figures.reward_mean is not None:
        means = f" mean {about}{figures.reward_mean:.4g}   last {figures.reward_last:.4g}"
        reward = [(_sparkline(figures.curve), "magenta"), means]
    if figures.tokens:
        reward.append(f"   {about}{_short(figures.tokens_per_second)} tokens/s ({about}{_short(figures.tokens)})")
    lines = [
        Text.assemble((f"── {name} ", "bold"), f"  {_duration(figures.seconds)}{eta}"),
        labelled("rollouts", *bar, *counts),
        labelled("reward", *reward),
    ]
    if figures.errors:
        lines.append(labelled("errors", (str(figures.errors), "red")))
        lines += [labelled("", (f"{one.rollout_id}  ", "dim"), one.message) for one in figures.failures]
    return lines


def _sparkline(points: Sequence[float]) -> str:
    """A small curve between its own lowest and highest point; a level one is low if it is zero, else in the middle."""
    low, high = min(points, default=0.0), max(points, default=0.0)
    level = len(_BLOCKS) // 2 if high > 0 else 0
    steps = [round((len(_BLOCKS) - 1) * (point - low) / (high - low)) if high > low else level for point in points]
    return "".join(_BLOCKS[step] for step in steps)


# ---------------------------------------------------------------------- which view, and phrases they share


def resolved_mode(mode: ProgressMode | None) -> ProgressMode:
    """What is shown: as the caller says, else AGL_PROGRESS, else `rich` on a terminal and `plain` elsewhere."""
    if mode is None:
        return "off"
    source, given = "progress", str(mode)
    if mode == "auto":
        source = LightningEnvVar.AGL_PROGRESS.value
        given = resolve_str_env_var(LightningEnvVar.AGL_PROGRESS, fallback="auto")
    modes: dict[str, ProgressMode] = {known: known for known in get_args(ProgressMode)}
    chosen = modes.get(given.strip().lower())
    if chosen is None:
        raise ConfigurationError(f"{source} must be one of {', '.join(modes)}; it is {given!r}.")
    if chosen != "auto":
        return chosen
    can_draw = os.environ.get("TERM") not in ("dumb", "unknown")
    return "rich" if sys.stdout is not None and sys.stdout.isatty() and can_draw else "plain"


def view_for(mode: ProgressMode | None, name: str) -> View | None:
    """The view of a mode; None shows nothing."""
    chosen = resolved_mode(mode)
    if chosen == "rich":
        from rich.console import Console as Terminal  # takes time to load

        return TerminalView(Terminal(), name)
    if chosen == "json":
        return JsonView(sys.stdout, name)
    # Lines do not mix with what the program itself writes to standard output.
    return LineView(sys.stderr, name) if chosen == "plain" and sys.stderr is not None else None


def agl_command() -> str:
    """How to call `agl` here: by its name, or by its path where that is not on the PATH."""
    beside = Path(sys.executable).with_name("agl")
    if shutil.which("agl") is not None or not beside.is_file():
        return "agl"
    is_below = beside.is_relative_to(Path.cwd())
    return shlex.quote(str(beside.relative_to(Path.cwd()) if is_below else beside))


def dashboard_command(address: str) -> str:
    """What to type to open the dashboard of a store."""
    return f"{agl_command()} dashboard {shlex.quote(address)}"


def _mean_reward(figures: Figures) -> list[str]:
    about = "~" if figures.is_estimate else ""
    return [] if figures.reward_mean is None else [f"mean reward {about}{figures.reward_mean:.4g}"]


def _duration(seconds: float) -> str:
    """`1:02:03`, without hours if there are none."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(number: float) -> str:
    """A number short enough for a line: `12.3k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
