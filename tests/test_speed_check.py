"""The speed check reads its reference, judges ratios by their intervals, and runs its workloads."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def speed_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("speed_check")
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCH:
            del sys.modules[name]


def test_interval_of_a_ratio_is_student_s_of_the_logarithms(speed_check: Any) -> None:
    measured = speed_check.paired_ratio([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])

    assert measured.ratio == pytest.approx(2.0)
    assert measured.high / measured.ratio == pytest.approx(5.595, abs=0.01)  # 2 ** (4.303 / sqrt(3))
    assert measured.low * measured.high == pytest.approx(measured.ratio**2)


def test_one_turn_tells_no_interval(speed_check: Any) -> None:
    with pytest.raises(ValueError, match="1 turns"):
        speed_check.paired_ratio([1.0], [1.0])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.09, 1.2, "FAIL"), (1.07, 1.3, "slower"), (0.9, 1.2, "same"), (0.8, 0.99, "faster")],
    ids=["above-the-limit", "above-one", "around-one", "below-one"],
)
def test_row_fails_only_if_its_whole_interval_lies_above_the_limit(
    low: float, high: float, expected: str, speed_check: Any
) -> None:
    measured = speed_check.PairedRatio((low + high) / 2, low, high)

    assert speed_check.verdict(measured, speed_check.MOST) == expected


def test_row_that_fails_is_measured_once_more(speed_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = [speed_check.PairedRatio(1.2, 1.1, 1.3), speed_check.PairedRatio(1.0, 0.9, 1.1)]
    monkeypatch.setattr(speed_check, "measure", lambda *_, **__: ratios.pop(0))

    verdict, _ = speed_check.check_row("memory", speed_check.Reference(REVISION), Path(), starts=1)

    assert (verdict, ratios) == ("same", [])


def test_reference_names_a_revision_and_the_rows_that_may_cost_more(speed_check: Any) -> None:
    reference = speed_check.parse_reference(f"# why\n{REVISION}\n\nsqlite 5 spans are checked twice\n")

    assert reference.revision == REVISION
    assert reference.limit("sqlite") == pytest.approx(1.08 * 1.05)
    assert reference.limit("memory") == 1.08


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "names no revision"),
        ("f1e329e\n", "Line 1: 'f1e329e' is not a full revision"),
        (f"{REVISION}\nsqlite 5\n", "Line 2: 'sqlite 5' is not a row, its percent and a reason"),
        (f"{REVISION}\ndisk 5 slow\n", "Line 2: there is no row 'disk'"),
        (f"{REVISION}\nsqlite five slow\n", "'five' is not a number of percent"),
        (f"{REVISION}\nsqlite -5 fast\n", "'-5' is not a number of percent"),
        (f"{REVISION}\nsqlite 5 a\nsqlite 6 b\n", "Line 3: row 'sqlite' has a line already"),
    ],
    ids=["empty", "short", "no-reason", "no-row", "no-number", "negative", "twice"],
)
def test_wrong_line_of_the_reference_is_named(text: str, message: str, speed_check: Any) -> None:
    with pytest.raises(speed_check.BadReference, match=message):
        speed_check.parse_reference(text)


def test_reference_of_this_checkout_can_be_read(speed_check: Any) -> None:
    assert speed_check.parse_reference(speed_check.REFERENCE.read_text("utf-8")).revision


def test_clone_without_the_revision_says_so_and_passes(
    speed_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reference").write_text(REVISION)
    monkeypatch.setattr(sys, "argv", ["speed_check.py", "--reference", str(tmp_path / "reference")])

    assert speed_check.main() == 0
    assert f"does not have the reference {REVISION}" in capsys.readouterr().out


def test_rows_are_those_of_the_workload(speed_check: Any) -> None:
    usage = subprocess.run(
        [sys.executable, str(BENCH / "workloads" / "per_rollout.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "{" + ",".join(speed_check.ROWS) + "}" in usage.stdout


def test_workload_tells_the_cpu_time_of_each_batch(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCH / "workloads" / "per_rollout.py"), "adapter"],
        cwd=tmp_path,
        input="\n\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )

    ready, *batches = [json.loads(line) for line in run.stdout.splitlines()]
    assert Path(ready["ready"]).name == "agentlightning"
    assert len(batches) == 2
    assert all(batch["cpu_seconds"] > 0 for batch in batches)
