"""The benchmark's workloads run and tell what they promise, and its tables judge it; how fast is not tested."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python

BENCH = Path(__file__).parent.parent / "bench"
GPU = BENCH / "gpu"
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
    (figures,) = run_script(folder, BENCH / "workloads" / script, *arguments)
    return figures


def run_script(folder: Path, script: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines that a script prints."""
    command = [sys.executable, str(script), *arguments]
    run = warm_python.run(command, cwd=folder, timeout=100)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the harness, and leaves none of them behind."""
    yield from modules_of(BENCH, monkeypatch)


@pytest.fixture
def gpu_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The same of the scripts for a GPU."""
    yield from modules_of(GPU, monkeypatch)


def modules_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
            del sys.modules[name]


@pytest.mark.parametrize("kind", ["memory", "http-sqlite"])
def test_store_workload_prints_its_figures_as_one_json_line(kind: str, tmp_path: Path) -> None:
    figures = run_workload(tmp_path, "store.py", kind, "--rollouts", "20")

    assert set(figures) == DESCRIPTION | RATES
    assert (figures["kind"], figures["rollouts"]) == (kind, 20)
    assert all(figures[rate] > 0 for rate in RATES)


@pytest.mark.slow
def test_latency_workload_tells_percentiles_of_the_calls_after_the_warm_up(tmp_path: Path) -> None:
    options = ("--workers", "6", "--seconds", "1", "--warm-up", "0.5")
    figures = run_workload(tmp_path, "dequeue_latency.py", "memory", *options)

    assert figures["calls"] == 60
    assert 0 < figures["calls_with_work"] <= 60
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
    figures = run_workload(tmp_path, "soaking.py", "--minutes", "0.02", "--alone", "10")

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


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        pytest.param({}, ["pass", "pass", ""], id="all-once"),
        pytest.param({"lost": 1}, ["FAIL", "pass", ""], id="never-claimed"),
        pytest.param({"twice": 1}, ["pass", "FAIL", ""], id="claimed-twice"),
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


# ---------------------------------------------------------------------- for a GPU, in miniature on the CPU

TINY_TRAINING = ("--tasks-per-step", "2", "--group-size", "3", "--runners", "1", "--precision", "full")
H200 = {"gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "date": "2026-11-16T12:00:00+00:00", "revision": "abc"}


@pytest.fixture
def miniature(tmp_path: Path, gpu_module: Callable[[str], Any]) -> str:
    """A folder with a model of random weights."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason="Hugging Face models need the extras train and hf")
    random_model = gpu_module("random_model")
    folder = tmp_path / "miniature"
    end = random_model.save_tokenizer(folder, None, random_model.SHAPES["miniature"]["vocab_size"])
    random_model.save_weights(folder, "miniature", "bfloat16", end)
    return str(folder)


@pytest.fixture
def in_miniature(miniature: str, tmp_path: Path) -> tuple[str, ...]:
    """The arguments that every script takes."""
    return (miniature, "--device", "cpu", "--label", "miniature", "--results", str(tmp_path / "results.jsonl"))


@pytest.mark.models
def test_speed_of_the_embedded_engine_is_told_for_every_number_of_callers(
    in_miniature: tuple[str, ...], tmp_path: Path
) -> None:
    options = ("--callers", "1,3", "--tokens", "4", "--rounds", "1")
    lines = run_script(tmp_path, GPU / "speed.py", *in_miniature, "embedded", *options)

    assert [(line["engine"], line["model"], line["callers"]) for line in lines] == [
        ("embedded", "miniature", 1),
        ("embedded", "miniature", 3),
    ]
    assert all(line["tokens_per_s"] > 0 for line in lines)
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == lines


def test_speed_of_generate_is_that_of_one_batch(
    in_miniature: tuple[str, ...], gpu_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--callers", "3", "--tokens", "4", "--rounds", "1")
    monkeypatch.setattr(sys, "argv", ["speed.py", *in_miniature, "generate", *options])

    gpu_module("speed").main()

    (line,) = gpu_module("results").read(tmp_path / "results.jsonl")
    assert (line["engine"], line["callers"], line["tokens_per_answer"]) == ("generate", 3, 4)


@pytest.mark.models
def test_a_step_is_split_into_rollouts_learning_and_publishing(in_miniature: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--steps", "2", "--tokens", "4", *TINY_TRAINING)
    (line,) = run_script(tmp_path, GPU / "step_split.py", *in_miniature, *options)

    parts = [line["seconds"][part] for part in ("rollouts", "learning", "publishing")]
    assert all(seconds > 0 for seconds in parts)
    assert line["seconds"]["whole"] >= 0.9 * sum(parts)
    assert line["trained_tokens"] > 0


@pytest.mark.models
def test_an_update_is_measured_in_each_checkout(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face models need the extras train and hf")
    options = ("--shape", "miniature", "--device", "cpu", "--rows", "4x10", "--precision", "bf16", "--rounds", "1")
    checkouts = ("--checkout", f"one={BENCH.parent}", "--checkout", f"none={tmp_path}")
    lines = run_script(
        tmp_path, GPU / "learner_update.py", *options, *checkouts, "--results", str(tmp_path / "results.jsonl")
    )

    one, none = lines
    assert f"no package in '{tmp_path}'" in none["not_run"]
    assert (one["checkout"], one["max_batch_tokens"], one["launches"]) == ("one", 4096, 0)
    assert one["seconds"] > 0
    assert one["operations"] > 100


@pytest.mark.models
def test_a_curve_has_the_rewards_of_every_step_and_those_of_validation(
    in_miniature: tuple[str, ...], tmp_path: Path
) -> None:
    options = ("--steps", "1", "--validation-tasks", "2", "--seed", "7", *TINY_TRAINING)
    (line,) = run_script(tmp_path, GPU / "curves.py", *in_miniature, *options)

    assert (line["seed"], line["dtype"], line["validated"]) == (7, "bfloat16", 2)
    assert len(line["curve"]) == 1
    assert line["interval"][0] <= line["after"] <= line["interval"][1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param("speed", ("vllm",), id="speed"),
        pytest.param("step_split", ("--engine", "vllm"), id="step"),
        pytest.param("curves", ("--engine", "vllm"), id="curve"),
        pytest.param("trl_steps", ("trl",), id="trl"),
    ],
)
def test_what_cannot_run_here_leaves_the_reason(
    script: str,
    words: tuple[str, ...],
    in_miniature: tuple[str, ...],
    gpu_module: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    find_spec = importlib.util.find_spec
    missing = ("vllm", "trl")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name in missing else find_spec(name, *of)
    )
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *in_miniature, *words])

    gpu_module(script).main()

    (line,) = gpu_module("results").read(tmp_path / "results.jsonl")
    assert line["not_run"]


def test_the_page_of_the_gpu_is_what_the_figures_say(gpu_module: Callable[[str], Any]) -> None:
    report, results = gpu_module("report"), gpu_module("results")
    page = report.PAGE.read_text(encoding="utf-8")

    assert report.filled(page, results.read(results.RESULTS)) == page
    assert [place[2] for place in report.PLACE.finditer(page)] == list(report.SECTIONS)


def test_the_report_judges_bars_and_gives_reasons(gpu_module: Callable[[str], Any]) -> None:
    report = gpu_module("report")
    common = {**H200, "figure": "speed", "model": report.SMALL}
    figures = [
        {**common, "engine": "embedded", "callers": 1, "tokens_per_s": 150.0},
        {**common, "engine": "embedded", "callers": 1, "tokens_per_s": 250.0},
        {**common, "engine": "embedded", "callers": 64, "tokens_per_s": 4000.0},
        {**common, "engine": "vllm", "not_run": "vLLM is not installed here"},
    ]

    lines = report.speed(figures)

    assert "| 1 | not run | 250 | not run | 200: met |" in lines
    assert "| 64 | not run | 4,000 | not run | 5,000: missed |" in lines
    assert "vLLM was not run: vLLM is not installed here." in lines


@pytest.mark.parametrize(
    ("vllm_after", "verdict"),
    [pytest.param(0.97, "the interval holds 0", id="alike"), pytest.param(0.6, "does not hold 0", id="different")],
)
def test_the_report_compares_the_final_rewards_of_the_engines(
    vllm_after: float, verdict: str, gpu_module: Callable[[str], Any]
) -> None:
    report = gpu_module("report")
    plain = {"figure": "curve", "model": report.SMALL, "dtype": "bfloat16", "rounding": "chance", "steps": 20}
    plain |= {**H200, "importance_cap": "default", "before": 0.2, "curve": [0.3, 0.95], "clipped": [0.1, 0.0]}
    afters = {"embedded": 0.98, "vllm": vllm_after}
    figures = [
        {**plain, "engine": engine, "seed": seed, "after": after, "interval": [after - 0.03, after + 0.02]}
        for engine, after in afters.items()
        for seed in report.SEEDS
    ]

    lines = report.curves(figures)

    assert any(verdict in line for line in lines)
    assert "| bfloat16 | chance | vLLM | default | 20 | 0.20 | " in "\n".join(report.rounding(figures))


def test_figures_of_a_machine_without_a_gpu_do_not_reach_the_page(gpu_module: Callable[[str], Any]) -> None:
    report = gpu_module("report")
    rehearsal = {**H200, "gpu": None, "figure": "speed", "model": report.SMALL, "engine": "embedded", "callers": 1}

    page = report.filled("<!-- figures: speed -->\n<!-- end of figures -->", [{**rehearsal, "tokens_per_s": 9.0}])

    assert "| 1 | not run | not run | not run | 200 |" in page
