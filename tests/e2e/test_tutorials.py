"""The programs of the tutorials that `tests/test_docs.py` leaves out: trainings, other languages, several processes."""

import asyncio
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.store import SqliteLightningStore
from tests import tutorials, warm_python

AGL = (sys.executable, "-m", "agentlightning.cli")


async def trained(path: Path) -> tuple[list[int], int]:
    """The steps that were made, and how many rollouts succeeded."""
    async with SqliteLightningStore(path) as store:
        (run,) = await store.query_runs()
        points = await store.query_metrics(run.run_id, names=["reward/mean"])
        return [point.step for point in points], len(await store.query_rollouts(status_in=["succeeded"]))


@pytest.mark.parametrize(
    ("page", "program"),
    [("train-your-first-agent.md", "first.py"), pytest.param("node.md", "train.py", id="node")],
)
def test_a_training_runs_as_it_was_saved(page: str, program: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="it trains the tiny model")
    if page == "node.md" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    for name, code in tutorials.programs_of(page).items():
        (tmp_path / name).write_text(tutorials.shortened(code) if name == program else code, encoding="utf-8")

    command = [sys.executable, program]
    done = warm_python.run(command, cwd=tmp_path, timeout=100, kind=warm_python.TorchPopen)

    assert done.returncode == 0, done.stderr
    assert tutorials.LAST_LINE.search(done.stdout), done.stdout
    assert asyncio.run(trained(tmp_path / "runs.db")) == ([1], tutorials.ROLLOUTS)


def test_store_runners_and_algorithm_work_as_processes_of_their_own(tmp_path: Path) -> None:
    for name, code in tutorials.programs_of("several-machines.md").items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    serve = [*AGL, "store", "--backend", "sqlite", "--path", "runs.db", "--port", "0"]
    with warm_python.Popen(serve, **options) as store:
        assert store.stdout is not None
        address = next(found[0] for line in store.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        work = [*AGL, "runner", "--store", address, "greeter:greet"]
        runners = [warm_python.Popen([*work, "--name", name], **options) for name in ("left", "right")]
        try:
            done = warm_python.run([sys.executable, "train.py", address], cwd=tmp_path, timeout=100)
        finally:
            for process in (*runners, store):
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)

    assert done.returncode == 0, done.stderr
    *scores, best, shares = done.stdout.splitlines()
    assert scores == ["0.00  Hey!", "0.50  Hey {name}!", "1.00  Good morning, {name}."]
    assert best == "the best prompt: Good morning, {name}."
    assert sum(map(int, re.findall(r": (\d+)", shares.partition("{")[2]))) == 3 * 32
