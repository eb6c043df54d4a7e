"""What a run has done, step by step, in a file: a run that was killed goes on from there.

Every step that costs something or is drawn by chance has a name, and its outcome is written as one line of JSON when
it is known. A second run with the same file finds the outcomes under the same names and does only what is missing.
Rollouts have ids that follow from the names, so that a store that outlasted the run gives back those that were under
way.

A line is written at once and synced; one that was cut off by a crash is dropped when the file is opened.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from agentlightning.errors import ConfigurationError
from agentlightning.utils.json_values import JsonMapping, JsonObject
from agentlightning.utils.private_files import append_to

_T = TypeVar("_T")

FORMAT: Final = 1
ID_DIGITS: Final = 20


class RunJournal:
    """Outcomes by the names of their steps; without a path nothing is kept.

    Args:
        identity: What makes the run what it is; a file of another run is refused.
        algorithm: Whose run it is.
    """

    def __init__(
        self, path: str | Path | None = None, identity: JsonMapping | None = None, *, algorithm: str = "APO"
    ) -> None:
        self._path = path = None if path is None else Path(path)
        self._steps: JsonObject = {}
        self._key = ""
        self._algorithm = algorithm
        if path is None:
            return
        described = json.loads(json.dumps(dict(identity or {}), default=str))
        lines = _lines_of(path, algorithm)
        if not lines:
            self._key = uuid.uuid4().hex
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"format": FORMAT, "algorithm": algorithm, "key": self._key, "identity": described})
            return
        head, *steps = lines
        if not isinstance(head, dict) or (head.get("format"), head.get("algorithm")) != (FORMAT, algorithm):
            raise _not_a_state(path, algorithm)
        if head["identity"] != described:
            others = sorted(name for name in described if head["identity"].get(name) != described[name])
            raise ConfigurationError(
                f"'{path}' holds the state of another run, with other {', '.join(others)}; remove it to begin anew, or "
                "name another state_file."
            )
        self._key = head["key"]
        self._steps = dict(steps)

    def __contains__(self, step: str) -> bool:
        return step in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, step: str) -> Any:
        """The outcome of a step; None if it is not known."""
        return self._steps.get(step)

    def put(self, step: str, outcome: object) -> None:
        """Keep the outcome of a step."""
        if self._path is not None:
            self._write([step, outcome])
            self._steps[step] = outcome

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self._steps.items())

    def remember(self, step: str, draw: Callable[[], _T]) -> _T:
        """What was drawn at a step: as it was the first time, or drawn now."""
        if step in self._steps:
            kept: _T = self._steps[step]
            return kept
        drawn = draw()
        self.put(step, drawn)
        return drawn

    @property
    def run_id(self) -> str | None:
        """An id for the run in the store, the same each time; None where nothing is kept."""
        return f"run-{self._algorithm.lower()}-{self._key[:ID_DIGITS]}" if self._path is not None else None

    def rollout_ids(self, step: str | None, count: int) -> list[str] | None:
        """Ids for the rollouts of a step, the same each time; None where nothing is kept."""
        if self._path is None or step is None:
            return None
        names = (f"{self._key} {step} {number}" for number in range(count))
        return [f"ro-{hashlib.sha256(name.encode()).hexdigest()[:ID_DIGITS]}" for name in names]

    def _write(self, line: object) -> None:
        assert self._path is not None
        with append_to(self._path) as file:
            file.write(json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _not_a_state(path: Path, algorithm: str) -> ConfigurationError:
    return ConfigurationError(f"'{path}' is not the state of a run of {algorithm}; name another state_file.")


def _lines_of(path: Path, algorithm: str) -> list[Any]:
    """The whole lines of a file; what stands behind the last line end is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise _not_a_state(path, algorithm) from error
