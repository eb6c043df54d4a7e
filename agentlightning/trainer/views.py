"""Where a training is shown: the seam between what the console knows and how it is told, and the view for machines.

`JsonView` writes one JSON object a line. Every object has `event`, `time` (seconds since 1970) and `name` (of the
training), and by event:

- `progress`, about once a second: `seconds`, `rollouts` by status, `finished`, `total`, `reward_mean`, `reward_last`,
  `tokens`, `tokens_per_second`, `errors`, `eta_seconds`, `is_estimate`;
- `rollout`, for a rollout that is finished: `rollout_id`, `status`, `reward`, `tokens`;
- `error`, for an attempt that failed: `rollout_id`, `attempt_id`, `message`;
- `summary`, last: as `progress`, and `store` and `command`, null if the store does not outlast the program.

Where rollouts finish faster than they are read, `rollout` and `error` come for some of them; `progress` counts all.
"""

import json
import shlex
import time
from typing import Any, Final, Protocol, TextIO

from agentlightning.trainer.progress import Failure, Figures, Sample

__all__ = ["JsonView", "View", "look_command"]

PROGRESS_SECONDS: Final = 1.0
"""Least time between two `progress` events."""


class View(Protocol):
    """Shows a training; the console calls it a few times a second, never at once from two threads."""

    def show(self, figures: Figures) -> None:
        """Show where the training stands."""

    def tell_rollout(self, sample: Sample) -> None:
        """A finished rollout was read."""

    def tell_failure(self, failure: Failure) -> None:
        """An attempt that failed was read."""

    def close(self) -> None:
        """Leave the output as it was found; nothing more is shown but, perhaps, the end."""

    def finish(self, figures: Figures, address: str | None) -> None:
        """Say how the training went, and where its store is if it can be found again."""


class JsonView:
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

    def close(self) -> None:
        """Lines need no undoing."""

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
