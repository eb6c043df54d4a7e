"""The benchmark's workloads run and tell what they promise, and its tables judge it; how fast is not tested."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"
DESCRIPTION = {"version", "kind", "rollouts", "spans", "workers", "batch"}
RATES = {
    "enqueue_per_s",
    "run_rollouts_per_s",
    "spans_per_s",
    "query_rollouts_per_s",
    "end_to_end_rollouts_per_s",
}


def run_workload(folder: Path, script: str, *arguments: str) -> dict[str, Any]:
    """The figures of a workload, which are the one line it prints."""
    command = [sys.executable, str(BENCH / "workloads" / script), *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    figures: dict[str, Any] = json.loads(line)
    return figures


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the harness, and leaves none of them behind."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCH:
            del sys.modules[name]


@pytest.mark.parametrize("kind", ["memory", "sqlite", "http", "http-sqlite"])
def test_store_workload_prints_its_figures_as_one_json_line(kind: str, tmp_path: Path) -> None:
    figures = run_workload(tmp_path, "store.py", kind, "--rollouts", "20")

    assert set(figures) == DESCRIPTION | RATES
    assert (figures["kind"], figures["rollouts"]) == (kind, 20)
    assert all(figures[rate] > 0 for rate in RATES)


@pytest.mark.slow
def test_latency_workload_tells_percentiles_of_the_calls_after_the_warm_up(tmp_path: Path) -> None:
    options = ("--workers", "6", "--seconds", "3", "--warm-up", "0.5")
    figures = run_workload(tmp_path, "dequeue_latency.py", "memory", *options)

    assert figures["calls"] == 180
    assert 0 < figures["calls_with_work"] <= 180
    assert 0 < figures["dequeue"]["p50_ms"] <= figures["dequeue"]["p99_ms"]


@pytest.mark.slow
def test_every_waiting_client_gets_one_rollout(tmp_path: Path) -> None:
    figures = run_workload(tmp_path, "waiting_clients.py", "sqlite", "--clients", "20", "--seconds", "0.5")

    assert (figures["clients_with_one"], figures["clients_with_none"], figures["left_in_queue"]) == (20, 0, 0)
    assert figures["server_cpu_percent"] >= 0


@pytest.mark.slow
def test_many_clients_claim_and_finish_every_rollout_once(tmp_path: Path) -> None:
    figures = run_workload(tmp_path, "many_clients.py", "memory", "--clients", "20", "--rollouts", "200")

    assert (figures["lost"], figures["twice"], figures["attempted_again"]) == (0, 0, 0)
    assert figures["statuses"] == {"succeeded": 200}
    assert figures["rollouts_per_s"] > 0


@pytest.mark.slow
def test_soak_tells_the_memory_of_both_servers(tmp_path: Path) -> None:
    figures = run_workload(tmp_path, "soaking.py", "--minutes", "0.05", "--alone", "10")

    for kind in ("memory", "sqlite"):
        assert figures[kind]["first_rss_mb"] > 0
        assert figures[kind]["last_rss_mb"] > 0
        assert figures[kind]["batches_per_s"] > 0


def test_network_section_holds_batches_against_single_calls_of_the_release(
    bench_module: Callable[[str], Any],
) -> None:
    rates = {"http": 400.0, "http, batch": 1000.0, "http-sqlite": 200.0, "http-sqlite, batch": 900.0}
    rates |= {f"{name}, long": rate for name, rate in rates.items()}
    rates |= {"release http": 40.0, "release http, batch": 50.0}

    figures = bench_module("network").ratios({name: [{"run_rollouts_per_s": rate}] for name, rate in rates.items()})

    judged = {figure.name: (figure.value, figure.verdict) for figure in figures}
    assert judged["http / release"] == (10, "pass")
    assert judged["http, batch / release"] == (25, "FAIL")
    assert judged["http, batch / release, batch"] == (20, "")
    assert judged["http-sqlite / http"] == (0.5, "FAIL")
    assert judged["http-sqlite, long / http, long"] == (0.5, "")


def test_network_section_does_not_judge_without_the_release(bench_module: Callable[[str], Any]) -> None:
    network = bench_module("network")
    names = [f"{kind}{way}" for kind in ("http", "http-sqlite") for way in network.WAYS]

    figures = network.ratios({name: [{"run_rollouts_per_s": 100.0}] for name in names})

    verdicts = {figure.name: figure.verdict for figure in figures}
    assert verdicts["http / release"] == "not measured"
    assert verdicts["http-sqlite / http"] == "pass"


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        pytest.param({}, ["pass", "pass", ""], id="all-once"),
        pytest.param({"lost": 1}, ["FAIL", "pass", ""], id="never-claimed"),
        pytest.param({"statuses": {"succeeded": 9, "running": 1}}, ["FAIL", "pass", ""], id="never-finished"),
        pytest.param({"twice": 1}, ["pass", "FAIL", ""], id="claimed-twice"),
        pytest.param({"attempted_again": 1}, ["pass", "FAIL", ""], id="attempted-again"),
    ],
)
def test_load_section_fails_what_was_lost_or_claimed_twice(
    found: dict[str, Any], verdicts: list[str], bench_module: Callable[[str], Any]
) -> None:
    clean = {"rollouts": 10, "statuses": {"succeeded": 10}, "lost": 0, "twice": 0, "attempted_again": 0}
    rest = {"rollouts_per_s": 5.0, "seconds": 2.0, "slowest_seconds": 1.0, "most_of_one_client": 1, "idle_clients": 0}

    figures = bench_module("load").figures_of("memory", {**clean, **rest, **found})

    assert [figure.verdict for figure in figures] == verdicts


def test_soak_takes_what_a_memory_store_keeps_off_before_it_judges(bench_module: Callable[[str], Any]) -> None:
    soak = bench_module("soak")
    grown = {"first_rss_mb": 100.0, "last_rss_mb": 150.0, "rollouts_since_first": 1000}

    assert soak.end_to_first("sqlite", grown, soak.TARGET).verdict == "FAIL"
    assert soak.end_less_kept(grown, 45.0, soak.TARGET).verdict == "pass"
    assert soak.end_less_kept(grown, 35.0, soak.TARGET).verdict == "FAIL"


def test_a_soak_is_measured_only_on_request(bench_module: Callable[[str], Any]) -> None:
    run = bench_module("run")

    assert "soak" not in [section.NAME for section in run.chosen(None)]
    assert [section.NAME for section in run.chosen(["soak", "load"])] == ["load", "soak"]
