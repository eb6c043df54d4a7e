"""Real runs of every algorithm, with a fault or healthy: whether their verdicts are right.

usage: python bench/verdicts.py [--only NAME ...]

The runs and the verdicts that are right are in `tests/verdict/seeded.py` (GRPO, and an algorithm of one's own) and
`tests/verdict/other_algorithms.py` (SFT, APO, GEPA, `Trainer.dev`, `agl eval`, a function). Prints each sentence, and
ends with 1 if a verdict is wrong.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the runs lie with the tests

from tests.verdict import other_algorithms, seeded

FAULTS = {**seeded.FAULTS, **other_algorithms.FAULTS}
HEALTHY = {**seeded.HEALTHY, **other_algorithms.HEALTHY}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make runs with a fault, and healthy ones, and judge the verdicts.")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS, *HEALTHY], metavar="NAME", help="some of the runs")
    only = parser.parse_args().only
    logging.disable(logging.WARNING)
    table = Table("run", "first finding", "wrong", "seconds", "verdict")
    right = {"faults": 0, "healthy": 0}
    total = {"faults": 0, "healthy": 0}
    began = time.perf_counter()
    for kind, runs in (("faults", FAULTS), ("healthy", HEALTHY)):
        for name, run in runs.items():
            if only is not None and name not in only:
                continue
            started = time.perf_counter()
            verdict = run.judged()
            errors = run.errors(verdict, is_healthy=kind == "healthy")
            total[kind] += 1
            right[kind] += not errors
            found = next((finding["name"] for finding in verdict["findings"]), "none")
            seconds = f"{time.perf_counter() - started:.1f}"
            table.add_row(name, found, "; ".join(errors), seconds, f"{verdict['outcome']}: {verdict['sentence']}")
            how = f"MISS {name} ({'; '.join(errors)})" if errors else f"ok   {name} ({found})"
            print(f"{how}: {verdict['sentence']}", flush=True)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    counts = ", ".join(f"{right[kind]} of {total[kind]} {kind}" for kind in total)
    print(f"Right: {counts}; {time.perf_counter() - began:.0f} s.")
    return 0 if right == total else 1


if __name__ == "__main__":
    sys.exit(main())
