"""All calls through the LLM proxy are accounted for while it is killed and terminated under load.

The work is done by the workload of the benchmark, which can be asked for more: `bench/workloads/proxy_accounting.py`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import left_behind

WORKLOAD = Path(__file__).parents[2] / "bench" / "workloads" / "proxy_accounting.py"
CONCURRENCY, KILLS, TERMS = 64, 3, 1


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


def accounted(folder: Path, calls: int) -> dict[str, Any]:
    amounts = {"calls": calls, "concurrency": CONCURRENCY, "kills": KILLS, "terms": TERMS}
    options = [f"--{name}={amount}" for name, amount in amounts.items()]
    run = subprocess.run(
        [sys.executable, str(WORKLOAD), *options, f"--folder={folder}"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    figures: dict[str, Any] = json.loads(run.stdout)
    return figures


@pytest.mark.slow
def test_every_answered_call_is_stored_once_though_the_proxy_is_killed(tmp_path: Path) -> None:
    figures = accounted(tmp_path, calls=3000)

    assert figures["answered"] >= 3000
    assert (figures["missing"], figures["doubled"], figures["misplaced"]) == (0, 0, 0)
    assert figures["beyond"] + figures["other_outcomes"] <= CONCURRENCY * (KILLS + TERMS + 1)
    assert (figures["without_raw"], figures["journal_left"]) == (0, [])
    assert figures["broken"] > 0  # the proxy was killed under load, not between calls
