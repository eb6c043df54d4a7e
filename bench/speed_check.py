"""Hold the CPU time per rollout against that of a reference revision; see README.md.

usage: python bench/speed_check.py [--only ROW ...] [--starts N] [--reference FILE]

Both revisions run the workloads of this one, with this environment's packages, in turns. A row fails if the whole 95 %
interval of its ratio lies above the limit, twice in a row. Ends with 1 if a row fails, and with 0 if none does or if
the clone does not have the reference.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from children import WORKLOADS, ChildFailed, child_environment
from paired_ratio import PairedRatio, paired_ratio

ROOT = Path(__file__).parent.parent
REFERENCE = Path(__file__).parent / "reference"
ROWS = ("memory", "sqlite", "http", "http-batched", "fit-shm", "fit-cs", "proxy", "adapter")
MOST = 1.08
"""The ratio above which no whole interval may lie; with a line of its own a row may cost so many percent more."""
STARTS = 4
"""Of the processes of each row."""
TURNS = 4
"""Of each start; in one turn each side does two batches."""
REVISION_CHARACTERS = 40
INTERRUPTED = 130
"""The exit code of a command that the user has ended."""


class BadReference(ValueError):
    """A line of the reference file cannot be read."""


class NoReference(Exception):
    """The clone does not have the reference's revision."""


@dataclass(frozen=True)
class Reference:
    """The revision to hold this one against, and the rows that may cost more than there."""

    revision: str
    percent_by_row: Mapping[str, float] = field(default_factory=dict)

    def limit(self, row: str) -> float:
        return MOST * (1 + self.percent_by_row.get(row, 0.0) / 100)


def parse_reference(text: str) -> Reference:
    """Read the reference file: a full revision, then `row percent reason` a line; `#` begins a comment."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise BadReference("The reference file names no revision; its first line is a full one.")
    number, revision = lines[0]
    if len(revision) != REVISION_CHARACTERS or set(revision) - set("0123456789abcdef"):
        raise BadReference(f"Line {number}: {revision!r} is not a full revision of {REVISION_CHARACTERS} characters.")
    percent_by_row: dict[str, float] = {}
    for number, line in lines[1:]:
        row, percent = parse_allowance(number, line)
        if row in percent_by_row:
            raise BadReference(f"Line {number}: row {row!r} has a line already.")
        percent_by_row[row] = percent
    return Reference(revision, percent_by_row)


def parse_allowance(number: int, line: str) -> tuple[str, float]:
    """The row of a line and by how many percent it may cost more."""
    words = line.split(maxsplit=2)
    if len(words) < 3:
        raise BadReference(f"Line {number}: {line!r} is not a row, its percent and a reason.")
    if words[0] not in ROWS:
        raise BadReference(f"Line {number}: there is no row {words[0]!r}; rows are {', '.join(ROWS)}.")
    try:
        percent = float(words[1])
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise BadReference(f"Line {number}: {words[1]!r} is not a number of percent between 0 and 100.")
    return words[0], percent


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A checkout of a revision of this clone, removed at the end."""
    if git("cat-file", "-e", f"{revision}^{{commit}}").returncode != 0:
        raise NoReference(f"This clone does not have the reference {revision}, so that nothing is compared.")
    with tempfile.TemporaryDirectory(prefix="agl-reference-") as folder:
        path = Path(folder) / "reference"
        try:
            added = git("worktree", "add", "--detach", str(path), revision)
            if added.returncode != 0:
                raise ChildFailed(f"The reference could not be checked out: {added.stderr.strip()}")
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


class Side:
    """A process that does batches of a row's work with the package of one checkout."""

    def __init__(self, row: str, root: Path, folder: Path, *, seed: int) -> None:
        self.label = f"{row} of {root.name}"
        self._root = root
        self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, str(WORKLOADS / "per_rollout.py"), row],
            cwd=folder,
            env={**child_environment(folder), "PYTHONPATH": str(root), "PYTHONHASHSEED": str(seed)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # so that all it starts can be ended with it
        )

    def wait_until_ready(self) -> None:
        measured = Path(self._read("ready"))
        if measured.parent.resolve() != self._root.resolve():
            raise ChildFailed(f"{self.label} measured the package in {measured}; look for another copy on its path.")

    def batch(self) -> float:
        """CPU seconds per unit of one more batch."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read("cpu_seconds"))

    def _read(self, name: str) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # a trainer prints lines of its own
                return json.loads(line)[name]
        self._errors.seek(0)
        raise ChildFailed(f"{self.label} ended early:\n{self._errors.read().decode(errors='replace')[-2000:]}")

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()


def measure(row: str, reference: Path, *, starts: int) -> PairedRatio:
    """The ratio of a row, over several starts of both sides: two processes of one program differ by a few percent."""
    ours: list[float] = []
    others: list[float] = []
    for start in range(1, starts + 1):
        print(f"  {row}: {start} of {starts}", flush=True)
        with both_sides(row, reference, seed=start) as (mine, other):
            for _ in range(TURNS):  # reference, ours, ours, reference: a drift of the machine meets both alike
                before = other.batch()
                ours.append(mine.batch() + mine.batch())
                others.append(before + other.batch())
    return paired_ratio(ours, others)


@contextmanager
def both_sides(row: str, reference: Path, *, seed: int) -> Iterator[tuple[Side, Side]]:
    """A process of this revision and one of the reference, both ready, with the same seed of hashes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-speed-")))
        mine, other = (Side(row, root, folder, seed=seed) for root in (ROOT, reference))
        stack.callback(mine.stop)
        stack.callback(other.stop)
        mine.wait_until_ready()
        other.wait_until_ready()
        yield mine, other


def verdict(measured: PairedRatio, limit: float) -> str:
    if measured.low > limit:
        return "FAIL"
    if measured.low > 1:
        return "slower"
    return "faster" if measured.high < 1 else "same"


def describe(row: str, measured: PairedRatio, limit: float) -> str:
    interval = f"{measured.low:.3f} to {measured.high:.3f}"
    return f"{row:<14}{measured.ratio:>7.3f}   {interval:<16}{limit:>7.3f}   {verdict(measured, limit)}"


def check_row(row: str, reference: Reference, path: Path, *, starts: int) -> tuple[str, str]:
    """Measure a row, and once more if it fails; its verdict and its line of the table."""
    limit = reference.limit(row)
    measured = measure(row, path, starts=starts)
    if verdict(measured, limit) == "FAIL":
        print(f"{describe(row, measured, limit)}; once more", flush=True)
        measured = measure(row, path, starts=starts)
    line = describe(row, measured, limit)
    print(line, flush=True)
    return verdict(measured, limit), line


def check(reference: Reference, rows: Sequence[str], *, starts: int) -> int:
    began = time.monotonic()
    with worktree(reference.revision) as path:
        print(f"CPU time per rollout against {reference.revision[:9]}, {starts} x {TURNS} turns a row", flush=True)
        results = [check_row(row, reference, path, starts=starts) for row in rows]
    print(f"\nrow           ratio   95 % interval     limit   verdict    ({time.monotonic() - began:.0f} s)")
    print("\n".join(line for _, line in results))
    failed = [row for row, (outcome, _) in zip(rows, results, strict=True) if outcome == "FAIL"]
    if failed:
        print(f"\nSlower than the reference, twice in a row: {', '.join(failed)}.")
        print("Mend it, or say in bench/reference why it must cost more.")
    elif all(outcome in ("same", "faster") for outcome, _ in results):
        print("\nNo row is slower than the reference.")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold the CPU time per rollout against that of a reference revision.")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=ROWS, default=ROWS, help=", ".join(ROWS))
    parser.add_argument("--starts", type=int, default=STARTS, help="of the processes of each row")
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="the file that names the revision")
    options = parser.parse_args()
    try:
        return check(parse_reference(options.reference.read_text("utf-8")), options.only, starts=options.starts)
    except NoReference as missing:
        print(missing)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BadReference, ChildFailed) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left behind
    sys.exit(main())
