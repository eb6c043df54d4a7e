"""A training where there is no terminal: plain lines, one at the start, one a step, and one at the end.

A step is what the algorithm adds metrics for, whatever it calls them. While there are none, a line comes every ten
seconds in which rollouts finish; once there are some, every minute, for steps that take long.
"""

import time
from collections.abc import Mapping
from typing import Final, TextIO

from agentlightning.trainer.progress import Figures
from agentlightning.trainer.views import View, duration, look_command
from agentlightning.types import MetricPoint

__all__ = ["LineView", "main_figures"]

LINE_SECONDS: Final = 10.0
"""Least time between two lines of an algorithm without metrics."""
LONG_STEP_SECONDS: Final = 60.0
"""After so long without a line, one comes though the step is not over."""
MOST_FIGURES: Final = 4
"""How many metrics of a step are named in its line."""
_MAIN_WORDS: Final = ("reward", "score", "accuracy")
"""Names, or parts of names, of the metrics that matter most."""


class LineView(View):
    """Writes plain lines."""

    def __init__(self, output: TextIO, name: str) -> None:
        self._output = output
        self._name = name
        self._points: list[MetricPoint] = []
        """Steps that are not written yet."""
        self._has_steps = False
        self._step_time = time.time()
        """When the last step ended, by the store's clock; at first, when the training began."""
        self._written_seconds = 0.0
        self._written_finished = self._written_errors = 0
        """What the last line counted."""
        self._step_finished = 0
        """How many rollouts had finished when the last step was written."""

    def begin(self, run_id: str | None, address: str | None) -> None:
        run = "" if run_id is None else f"  run {run_id}"
        where = "in memory" if address is None else f"{address}  look at it: {look_command(address)}"
        self._write(f"0:00{run}  store {where}")

    def tell_metrics(self, point: MetricPoint) -> None:
        self._points.append(point)

    def show(self, figures: Figures) -> None:
        points, self._points = self._points, []
        for point in points:
            self._write_step(point, figures)
        quiet_seconds = figures.elapsed_seconds - self._written_seconds
        has_changed = figures.finished != self._written_finished or figures.errors != self._written_errors
        if has_changed and quiet_seconds >= (LONG_STEP_SECONDS if self._has_steps else LINE_SECONDS):
            self._write_counted(figures, [f"{figures.finished}/{figures.total} rollouts", *_reward(figures)])

    def finish(self, figures: Figures, address: str | None) -> None:
        for point in self._points:
            self._write_step(point, figures)
        by_status = ", ".join(f"{count} {status}" for status, count in figures.rollouts.items())
        look = [] if address is None else [f"look at it again: {look_command(address)}"]
        self._written_errors = 0  # the last line counts all of them
        self._write_counted(figures, ["ended", f"rollouts: {by_status or 'none'}", *_reward(figures)], look)

    def _write_step(self, point: MetricPoint, figures: Figures) -> None:
        seconds, self._step_time = max(0.0, point.time - self._step_time), point.time
        self._has_steps = True
        finished, self._step_finished = figures.finished - self._step_finished, figures.finished
        named = [f"{name} {value:.4g}" for name, value in main_figures(point.values).items()]
        count = f"{_counted(finished, 'rollout')} in " if finished > 0 else ""
        self._write_counted(figures, [f"step {point.step}", *named, f"{count}{seconds:.1f} s"])

    def _write_counted(self, figures: Figures, parts: list[str], last: list[str] | None = None) -> None:
        """A line at a moment; errors are named where there are new ones."""
        errors = figures.errors - self._written_errors
        parts = [
            duration(figures.elapsed_seconds),
            *parts,
            *([_counted(errors, "error")] if errors else []),
            *(last or []),
        ]
        self._written_seconds = figures.elapsed_seconds
        self._written_finished, self._written_errors = figures.finished, figures.errors
        self._write("  ".join(parts))

    def _write(self, text: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in f"{self._name}  {text}")
        self._output.write(f"{line}\n")
        self._output.flush()


def main_figures(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a line has room for, in this order: `reward/mean`, `learner/loss`, `best_score`, any other."""

    def rank(name: str) -> int:
        words = name.lower().split("/")
        if not set(_MAIN_WORDS).isdisjoint(words):
            return 0
        if "loss" in words:
            return 1
        return 2 if any(main in words[-1] for main in _MAIN_WORDS) else 3

    return {name: values[name] for name in sorted(values, key=rank)[:MOST_FIGURES]}


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _reward(figures: Figures) -> list[str]:
    about = "~" if figures.is_estimate else ""
    return [] if figures.reward_mean is None else [f"mean reward {about}{figures.reward_mean:.4g}"]
