"""The calculator agent learns from reward alone, whatever happens to the process that trains it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="learning needs torch")

import agentlightning as agl  # after the check for torch
from agentlightning.algorithm.grpo import Checkpoints
from agentlightning.algorithm.grpo.curriculum import Curriculum

SCRIPT = Path(__file__).parent / "learning_script.py"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "calc_x"
PATIENCE_SECONDS = 240.0
ENOUGH_STEPS = 12
KILLED_AFTER = 4
"""Steps; the moment within the next one is chance."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@contextmanager
def training(folder: Path, *, steps: int, save_every: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
    """The script in a process of its own; whatever it started is gone afterwards."""
    command = [sys.executable, str(SCRIPT), str(folder), str(steps), str(save_every)]
    with open(folder / "errors", "ab") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors)
    family: list[psutil.Process] = []
    try:
        yield process
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []


def until(is_true: Callable[[], Any], process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert process.poll() is None, (folder / "errors").read_text()[-2000:]
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def finished(process: "subprocess.Popen[bytes]", folder: Path) -> dict[str, Any]:
    assert process.wait(PATIENCE_SECONDS) == 0, (folder / "errors").read_text()[-2000:]
    told: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return told


def steps_in(folder: Path) -> int:
    log = folder / "log"
    return log.read_text().count("mean reward") if log.exists() else 0


def latest(folder: Path) -> Any:
    found = Checkpoints(folder / "checkpoints" / "tiny").latest()
    assert found is not None
    return found


def test_run_that_is_killed_in_the_middle_goes_on_and_learns_as_well(tmp_path: Path) -> None:
    with training(tmp_path, steps=ENOUGH_STEPS) as process:
        until(lambda: steps_in(tmp_path) >= KILLED_AFTER, process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == [], f"left behind by a run that was killed after step {KILLED_AFTER}"
    kept = latest(tmp_path).step

    with training(tmp_path, steps=ENOUGH_STEPS) as process:
        told = finished(process, tmp_path)

    assert KILLED_AFTER - 1 <= kept <= ENOUGH_STEPS
    assert (told["steps"], len(told["rewards"])) == (ENOUGH_STEPS, ENOUGH_STEPS)
    assert told["base"] <= 0.05
    assert told["after"] >= 0.9
    assert asyncio.run(tasks_by_step(tmp_path)) == expected_tasks()


def expected_tasks() -> dict[int, set[str]]:
    """What each step would have been given, had nothing happened."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import tasks
    finally:
        sys.path.remove(str(EXAMPLE))
    from tests.e2e.learning_script import SEED, TASKS_PER_STEP, TRAINING_TASKS

    curriculum = Curriculum(tasks.tasks(TRAINING_TASKS, held_out=False), SEED)
    return {step: {task["question"] for task in curriculum.take(TASKS_PER_STEP)} for step in range(ENOUGH_STEPS)}


async def tasks_by_step(folder: Path) -> dict[int, set[str]]:
    store = agl.SqliteLightningStore(folder / "runs.db")
    found: dict[int, set[str]] = {}
    try:
        for rollout in await store.query_rollouts():
            if rollout.mode == "train":
                found.setdefault((rollout.metadata or {})["step"], set()).add(rollout.input["question"])
    finally:
        await store.close()
    return found


def test_ctrl_c_leaves_a_checkpoint(tmp_path: Path) -> None:
    with training(tmp_path, steps=500, save_every=1000) as process:
        until(lambda: steps_in(tmp_path) >= 2, process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)

        os.kill(process.pid, signal.SIGINT)

        process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    kept = latest(tmp_path)
    assert kept.step >= 2
    assert kept.progress["version"] <= kept.step
    assert kept.progress["curriculum"]["position"] == kept.step * 16
