"""Where a training is shown: the seam between what the console knows and how it is told, and the view for machines.

`JsonView` writes one JSON object a line. Every object has `event`, `time` (seconds since 1970) and `name` (of the
training), and by event:

- `progress`, about once a second: `seconds`, `rollouts` by status, `finished`, `total`, `reward_mean`, `reward_last`,
  `tokens`, `tokens_per_second`, `errors`, `eta_seconds`, `is_estimate`;
- `rollout`, for a rollout that is finished: `rollout_id`, `status`, `reward`, `tokens`;
- `error`, for an attempt that failed: `rollout_id`, `attempt_id`, `message`;
- `metrics`, for what the algorithm added to its run: `step`, `values`;
- `summary`, last: as `progress`, and `store` and `command`, null if the store does not outlast the program.

Where they come faster than they are read, `rollout`, `error` and `metrics` come for some of them; `progress` counts
all rollouts.
"""

import json
import shlex
import time
from typing import Any, Final, TextIO

from agentlightning.trainer.progress import Failure, Figures, Sample
from agentlightning.types import MetricPoint

__all__ = ["JsonView", "View", "duration", "look_command"]

PROGRESS_SECONDS: Final = 1.0
"""Least time between two `progress` events."""


class View:
    """Shows a training; the console calls it a few times a second, never at once from two threads.

    What a view does not define, it does not show.
    """

    def begin(self, run_id: str | None, address: str | None) -> None:
        """A training begins; the address is where its store can be looked at meanwhile."""

    def show(self, figures: Figures) -> None:
        """Show where the training stands."""

    def tell_rollout(self, sample: Sample) -> None:
        """A finished rollout was read."""

    def tell_failure(self, failure: Failure) -> None:
        """An attempt that failed was read."""

    def tell_metrics(self, point: MetricPoint) -> None:
        """The algorithm has added figures to its run."""

    def close(self) -> None:
        """Leave the output as it was found; nothing more is shown but, perhaps, the end."""

    def finish(self, figures: Figures, address: str | None) -> None:
        """Say how the training went, and where its store is if it can be found again."""


class JsonView(View):
    """Events as lines."""

    def __init__(self, output: TextIO, name: str) -> None:
        self._output = output
        self._name = name
        self._shown_seconds: float | None = None

    def show(self, figures: Figures) -> None:
        last, now = self._shown_seconds, figures.elapsed_seconds
        if last is None or now - last >= PROGRESS_SECONDS:
            self._shown_seconds = now
            self._write("progress", _as_fields(figures))

    def tell_rollout(self, sample: Sample) -> None:
        fields = {"rollout_id": sample.rollout_id, "status": sample.status}
        self._write("rollout", {**fields, "reward": sample.reward, "tokens": sample.tokens})

    def tell_failure(self, failure: Failure) -> None:
        fields = {"rollout_id": failure.rollout_id, "attempt_id": failure.attempt_id, "message": failure.message}
        self._write("error", fields)

    def tell_metrics(self, point: MetricPoint) -> None:
        self._write("metrics", {"step": point.step, "values": dict(point.values)})

    def finish(self, figures: Figures, address: str | None) -> None:
        command = None if address is None else look_command(address)
        self._write("summary", {**_as_fields(figures), "store": address, "command": command})

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), "name": self._name, **fields})
        self._output.write(f"{line}\n")
        self._output.flush()


def _as_fields(figures: Figures) -> dict[str, Any]:
    return {
        "seconds": round(figures.elapsed_seconds, 3),
        "rollouts": dict(figures.rollouts),
        "finished": figures.finished,
        "total": figures.total,
        "reward_mean": figures.reward_mean,
        "reward_last": figures.reward_last,
        "tokens": figures.tokens,
        "tokens_per_second": round(figures.tokens_per_second, 1),
        "errors": figures.errors,
        "eta_seconds": None if figures.eta_seconds is None else round(figures.eta_seconds, 1),
        "is_estimate": figures.is_estimate,
    }


def look_command(address: str) -> str:
    """What to type to open the dashboard of a store."""
    return f"agl dashboard {shlex.quote(address)}"


def duration(seconds: float) -> str:
    """`1:02:03`, without hours if there are none."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
