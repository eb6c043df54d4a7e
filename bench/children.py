"""Child processes: every measurement runs in one, under the interpreter that has the package to measure.

A child runs outside the repository, because a release that is started inside it would import our package instead of
its own. It tells progress on standard error and its figures in one JSON line on standard output. No child outlives
its caller.
"""

import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKLOADS = Path(__file__).parent / "workloads"
CHILD_SECONDS = 1800.0
ERROR_LINES = 15
PROGRESS = "progress: "
"""How a line of standard error begins that is meant to be shown."""

Figures = dict[str, Any]


class ChildFailed(RuntimeError):
    """A child ended without figures, or measured another version than it should."""


@dataclass(frozen=True)
class Interpreter:
    """A Python with a release of the package in it."""

    python: str
    version: str


@dataclass(frozen=True)
class Bench:
    """What a section has to work with."""

    ours: Interpreter
    baseline: Interpreter | None
    """None if the release could not be installed."""
    folder: Path
    """Temporary, and removed at the end; databases and the disk probe lie in it."""
    tell: Callable[[str], None]
    """Shows what is going on."""
    is_quick: bool = False
    soak_minutes: float = 10.0

    def run(self, interpreter: Interpreter, script: str, *arguments: str, seconds: float = CHILD_SECONDS) -> Figures:
        """Run a workload, for so long at most; `script` names a file in workloads/."""
        label = " ".join([script.removesuffix(".py"), *arguments, f"({interpreter.version})"])
        self.tell(label)
        command = [interpreter.python, str(WORKLOADS / script), *arguments]
        output = run_child(
            command, folder=self.folder, on_progress=lambda line: self.tell(f"{label}: {line}"), seconds=seconds
        )
        return checked_figures(output, interpreter)

    def alternate(self, cases: Mapping[str, Sequence[Any]], rounds: int) -> dict[str, list[Figures]]:
        """Run every case once a round, so that a slow moment of the machine meets all of them alike.

        A case is what `run` takes: an interpreter, a script and its arguments.
        """
        runs: dict[str, list[Figures]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, (interpreter, script, *arguments) in cases.items():
                runs[name].append(self.run(interpreter, script, *arguments))
        return runs


def checked_figures(output: str, interpreter: Interpreter) -> Figures:
    """The last line of a child's output, if it comes from the version that was meant."""
    lines = output.strip().splitlines()
    if not lines:
        raise ChildFailed(f"A workload under {interpreter.python} printed nothing.")
    figures: Figures = json.loads(lines[-1])
    if figures["version"] != interpreter.version:
        raise ChildFailed(
            f"{interpreter.python} measured version {figures['version']} instead of {interpreter.version}; "
            "look for another copy of the package on its path."
        )
    return figures


def child_environment(folder: Path) -> dict[str, str]:
    """Ours, without what would lead a child to another package or spoil its times."""
    # PYTHONPATH could show a release our package; without cached bytecode every import compiles it again.
    environment = {name: value for name, value in os.environ.items() if name not in _HARMFUL}
    return {**environment, "TMPDIR": str(folder)}


_HARMFUL = frozenset({"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPROFILEIMPORTTIME", "PYTHONDEVMODE"})


def run_child(
    command: Sequence[str],
    *,
    folder: Path,
    on_progress: Callable[[str], None] | None = None,
    seconds: float = CHILD_SECONDS,
) -> str:
    """Run a command to its end and return its standard output; what it tells of progress is passed on as it comes."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=child_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    output: list[str] = []
    # Read beside standard error: a child that fills one pipe while we wait at the other would never end.
    reader = threading.Thread(target=lambda stream: output.append(stream.read()), args=(process.stdout,), daemon=True)
    reader.start()
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    last_lines: deque[str] = deque(maxlen=ERROR_LINES)
    try:
        for line in process.stderr:
            if line.startswith(PROGRESS) and on_progress is not None:
                on_progress(line.removeprefix(PROGRESS).strip())
            else:
                last_lines.append(line.rstrip())
        process.wait()
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        reader.join()
    if process.returncode != 0:
        raise ChildFailed(f"{' '.join(command)} ended with {process.returncode}:\n" + "\n".join(last_lines))
    return output[0]
