"""The benchmark's store workload runs and tells what it promises; how fast is not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKLOAD = Path(__file__).parent.parent / "bench" / "workloads" / "store.py"
DESCRIPTION = {"version", "kind", "rollouts", "spans", "workers", "batch"}
RATES = {
    "enqueue_per_s",
    "run_rollouts_per_s",
    "spans_per_s",
    "query_rollouts_per_s",
    "end_to_end_rollouts_per_s",
}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_store_workload_prints_its_figures_as_one_json_line(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(WORKLOAD), kind, "--rollouts", "20"]

    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    figures = json.loads(line)
    assert set(figures) == DESCRIPTION | RATES
    assert (figures["kind"], figures["rollouts"]) == (kind, 20)
    assert all(figures[rate] > 0 for rate in RATES)
