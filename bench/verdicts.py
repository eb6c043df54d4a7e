"""Real trainings with a fault in their agent, and healthy ones: what their verdicts name.

usage: python bench/verdicts.py [--only NAME ...]

Each fault is written into a copy of an agent of `examples/` (`tests/verdict/seeded.py`). Ends with 1 if a fault is not
named as the first finding, or if a healthy training has a finding.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the faults lie with the tests

from tests.verdict.seeded import FAULTS, HEALTHY, trained


def main() -> int:
    parser = argparse.ArgumentParser(description="Train agents with a fault, and healthy ones, and judge the verdicts.")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS, *HEALTHY], metavar="NAME", help="some of the trainings")
    only = parser.parse_args().only
    logging.disable(logging.WARNING)
    table = Table("training", "first finding", "as it should be", "seconds", "verdict")
    missed = 0
    for name, fault in {**FAULTS, **HEALTHY}.items():
        if only is not None and name not in only:
            continue
        started = time.perf_counter()
        verdict = trained(fault)
        found = next((finding["name"] for finding in verdict["findings"]), None)
        is_right = found == fault.finding and (fault.finding is not None or verdict["outcome"] == "gained")
        missed += not is_right
        seconds = f"{time.perf_counter() - started:.1f}"
        table.add_row(name, found or "none", "yes" if is_right else "NO", seconds, verdict["sentence"])
        print(f"{'ok  ' if is_right else 'MISS'} {name}: {found or 'none'}", flush=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
