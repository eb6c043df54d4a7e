"""Measure speed and memory, and hold them against the targets and the public release; see README.md.

usage: python bench/run.py [--quick] [--only NAME ...] [--minutes N] [--baseline PYTHON] [--output FILE]

Ends with 0 when everything was measured, whether or not a target was missed: on a busy machine a miss is a reason to
look, not a fault. Ends with 1 when a section could not be measured.
"""

import argparse
import hashlib
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import adapter
import baseline
import dashboard
import durability
import flatness
import idle
import large_queries
import latency
import load
import network
import proxy
import soak
import span_encoding
import startup
import throughput
import tracing
import trainer
from children import Bench, ChildFailed, Interpreter
from report import Outcome, show
from rich.console import Console

import agentlightning

SECTIONS = (
    throughput,
    durability,
    span_encoding,
    large_queries,
    flatness,
    startup,
    network,
    latency,
    idle,
    load,
    adapter,
    tracing,
    trainer,
    proxy,
    dashboard,
)
ON_REQUEST = (soak,)
"""Sections that are measured only if they are named."""
TABLE_COLUMNS = 120
"""Width of the tables where there is no terminal."""
RESULTS = Path(__file__).parent / "results.json"


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as folder, progress(console) as tell:
        Path(folder).chmod(0o711)  # PostgreSQL runs under another account
        bench = Bench(
            ours=Interpreter(sys.executable, agentlightning.__version__),
            baseline=find_baseline(console, options.baseline, Path(folder), tell),
            folder=Path(folder),
            tell=tell,
            is_quick=options.quick,
            soak_minutes=options.minutes,
        )
        facts = machine_facts(bench)
        sources = fingerprint()
        outcomes = {}
        for section in chosen(options.only):
            outcomes[section.NAME] = outcome = measure(section, bench)
            show(console, title_of(section, bench), outcome)
    facts["sources_changed"] = fingerprint() != sources
    if facts["sources_changed"]:
        console.print("The package's sources changed during the run; measure again.", style="bold red")
    write(options.output, facts, outcomes)
    summarise(console, outcomes, options.output)
    return 1 if any(outcome.error for outcome in outcomes.values()) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure speed and memory, side by side with the public release.")
    parser.add_argument("--quick", action="store_true", help="fewer runs and smaller stores")
    names = [section.NAME for section in (*SECTIONS, *ON_REQUEST)]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=soak.MINUTES, help="how long the soak takes")
    parser.add_argument("--baseline", metavar="PYTHON", help="an interpreter that already has the release")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the figures go as JSON")
    return parser.parse_args()


def chosen(names: Sequence[str] | None) -> list[Any]:
    """The sections of these names, in the order of the tables; without names, all but those on request."""
    if names is None:
        return list(SECTIONS)
    return [section for section in (*SECTIONS, *ON_REQUEST) if section.NAME in names]


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done; where there is no terminal, a line each."""
    if not console.is_terminal:
        yield lambda line: print(f"  {line}", flush=True)
        return
    with console.status("starting") as status:
        yield lambda line: status.update(line[: console.width - 4])


def find_baseline(
    console: Console, python: str | None, folder: Path, tell: Callable[[str], None]
) -> Interpreter | None:
    """Without the release there are no ratios, but everything else can still be measured."""
    try:
        return baseline.given(python, folder) if python else baseline.find_or_install(folder, tell)
    except (ChildFailed, OSError, subprocess.SubprocessError) as error:
        console.print(f"No release to compare with, so there will be no ratios: {error}", style="yellow", markup=False)
        return None


def measure(section: Any, bench: Bench) -> Outcome:
    """A section that fails does not keep the others from being measured."""
    try:
        outcome: Outcome = section.measure(bench)
    except ChildFailed as error:
        return Outcome(error=str(error))
    return outcome


def title_of(section: Any, bench: Bench) -> str:
    """Some sections are smaller in a quick run, and say so."""
    title: str = section.TITLE.format(**section.sizes(bench)) if hasattr(section, "sizes") else section.TITLE
    return title


def machine_facts(bench: Bench) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": bench.ours.version,
        "revision": revision(),
        "release": bench.baseline.version if bench.baseline else None,
        "is_quick": bench.is_quick,
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def revision() -> str | None:
    """The commit that was measured; None outside a git checkout."""
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def fingerprint() -> str:
    """Changes whenever a file of the package does."""
    digest = hashlib.sha256()
    for path in sorted(Path(agentlightning.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".sql"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def write(path: Path, facts: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    """Put the sections that were measured into the file, each with when and how; the others stay as they were."""
    known = json.loads(path.read_text(encoding="utf-8"))["sections"] if path.exists() else {}
    measured = {name: {**outcome.as_json(), "measured": facts} for name, outcome in outcomes.items()}
    path.write_text(json.dumps({"sections": known | measured}, indent=2) + "\n", encoding="utf-8")


def summarise(console: Console, outcomes: dict[str, Outcome], path: Path) -> None:
    verdicts = [figure.verdict for outcome in outcomes.values() for figure in outcome.figures]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("pass", "FAIL", "not measured"))
    console.print(f"{counts}; figures in {path}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
