"""The adapter's benchmark runs and judges; how fast is not tested, but that the time does not explode is."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def section(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The section's module, which leaves none of the harness behind."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("adapter")
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCH:
            del sys.modules[name]


def test_the_workload_tells_its_seconds_as_one_json_line(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "workloads" / "adapter.py"), "10", "4000", "--repeats", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)

    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    assert set(figures["seconds"]) == {"10", "4000"}
    assert figures["seconds"]["4000"] < 5  # comparing all pairs takes nine


@pytest.mark.parametrize(
    ("longest", "verdicts"), [(1.0, ["pass", "pass", "pass"]), (4.0, ["pass", "FAIL", "FAIL"])], ids=["linear", "not"]
)
def test_the_section_judges_ratio_time_and_growth(section: Any, longest: float, verdicts: list[str]) -> None:
    ours = {"seconds": {"3000": 0.02, "10000": 0.1, "100000": longest}}

    outcome = section.outcome_of({"ours": [ours], "release": [{"seconds": {"3000": 3.0}}]})

    assert [figure.verdict for figure in outcome.figures if figure.target] == verdicts


def test_the_section_does_not_judge_without_the_release(section: Any) -> None:
    outcome = section.outcome_of({"ours": [{"seconds": {"3000": 0.02, "10000": 0.1, "100000": 1.0}}]})

    assert outcome.figures[1].verdict == "not measured"
