"""The calculator agent learns from reward alone, whatever happens to the process that trains it."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="learning needs torch")

import agentlightning as agl  # after the check for torch
from agentlightning.algorithm.grpo import Checkpoints
from agentlightning.algorithm.grpo.tasks import Curriculum
from tests import warm_python

SCRIPT = Path(__file__).parent / "learning_script.py"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "calc_x"
PATIENCE_SECONDS = 240.0
ENOUGH_STEPS = 6
SEEDS = tuple(range(int(os.environ.get("AGL_KILLED_RUNS", "1"))))
"""Of the kills; more of them take half a minute each."""
LONGEST_DELAY_SECONDS = 0.5
"""After a step has begun, until the process is killed."""
LEARNED = 0.75
"""The least mean reward afterwards, of tasks that were not trained on; before it is 0.05 at most."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def training(folder: Path, *, steps: int, save_every: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
    """The script in a process of its own; whatever it started is gone afterwards."""
    command = [sys.executable, str(SCRIPT), str(folder), str(steps), str(save_every)]
    with open(folder / "errors", "ab") as errors:
        process = warm_python.TorchPopen(command, stdout=errors, stderr=errors)
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
    """The last step that was logged; one that a killed run did not save is logged twice."""
    log = folder / "log"
    found = re.findall(r"Step (\d+): mean reward", log.read_text()) if log.exists() else []
    return max(map(int, found), default=0)


def latest(folder: Path) -> Any:
    found = Checkpoints(folder / "checkpoints" / "tiny").latest()
    assert found is not None
    return found


def kill(process: "subprocess.Popen[bytes]") -> None:
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == [], "left behind by a run that was killed"


@pytest.mark.parametrize("seed", SEEDS, ids="seed-{}".format)
def test_run_that_is_killed_in_a_step_goes_on_and_learns_as_well(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    step, delay = chance.randrange(1, ENOUGH_STEPS - 2), chance.uniform(0, LONGEST_DELAY_SECONDS)
    print(f"seed {seed}: killed {delay:.2f} s into step {step + 1}")
    with training(tmp_path, steps=ENOUGH_STEPS) as process:
        until(lambda: steps_in(tmp_path) >= step, process, tmp_path)
        until(lambda: asyncio.run(unfinished(tmp_path)), process, tmp_path)
        time.sleep(delay)  # not for anything to happen: any moment is a good one
        kill(process)
    kept, left = latest(tmp_path), asyncio.run(unfinished(tmp_path))
    assert step - 1 <= kept.step < ENOUGH_STEPS

    resumed_at = time.time()
    with training(tmp_path, steps=ENOUGH_STEPS) as process:
        told = finished(process, tmp_path)

    assert (told["steps"], len(told["rewards"])) == (ENOUGH_STEPS, ENOUGH_STEPS)
    assert told["rewards"][: kept.step] == kept.progress["rewards"]
    assert asyncio.run(tasks_by_step(tmp_path)) == expected_tasks()
    assert told["base"]["mean"] <= 0.05
    assert told["after"]["mean"] >= LEARNED
    check_what_was_left(tmp_path, left, resumed_at)


def check_what_was_left(folder: Path, left: list[str], resumed_at: float) -> None:
    """No agent runs what a killed training left in the queue, and its run in the store has ended."""
    statuses, later = asyncio.run(what_became_of(folder, left, resumed_at))
    assert set(statuses) <= {"cancelled"}
    assert later == []
    dead, _ = asyncio.run(runs(folder))
    assert (dead.status, dead.end_time is None) == ("failed", False)
    assert "ended without notice" in dead.summary["error"]


def expected_tasks() -> dict[int, set[str]]:
    """What each step would have been given, had nothing happened."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import tasks
    finally:
        sys.path.remove(str(EXAMPLE))
    from tests.e2e.learning_script import SEED, TASKS_PER_STEP, TRAINING_TASKS

    curriculum = Curriculum(tasks.tasks(TRAINING_TASKS, held_out=False), SEED)
    return {step: {task["question"] for _, task in curriculum.take(TASKS_PER_STEP)} for step in range(ENOUGH_STEPS)}


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


async def unfinished(folder: Path) -> list[str]:
    """Ids of the rollouts that are queued or under way."""
    store = agl.SqliteLightningStore(folder / "runs.db")
    try:
        open_ones = await store.query_rollouts(status_in=["queuing", "requeuing", "preparing", "running"])
        return [rollout.rollout_id for rollout in open_ones]
    finally:
        await store.close()


async def what_became_of(folder: Path, rollout_ids: list[str], since: float) -> tuple[list[str], list[Any]]:
    """The statuses of rollouts, and their attempts that began after a moment."""
    store = agl.SqliteLightningStore(folder / "runs.db")
    try:
        found = await store.query_rollouts(rollout_id_in=rollout_ids)
        attempts = [attempt for one in rollout_ids for attempt in await store.query_attempts(one)]
    finally:
        await store.close()
    return [rollout.status for rollout in found], [one for one in attempts if one.start_time > since]


async def runs(folder: Path) -> list[Any]:
    store = agl.SqliteLightningStore(folder / "runs.db")
    try:
        return list(await store.query_runs())
    finally:
        await store.close()


def test_ctrl_c_leaves_a_checkpoint(tmp_path: Path) -> None:
    with training(tmp_path, steps=500, save_every=1000) as process:
        until(lambda: steps_in(tmp_path) >= 1, process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)

        os.kill(process.pid, signal.SIGINT)

        assert process.wait(60) == -signal.SIGINT
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    kept = latest(tmp_path)
    assert kept.step >= 1
    assert kept.progress["version"] <= kept.step
    place = kept.progress["curriculum"]
    assert place["position"] - len(place["open"]) == kept.step * 16
    said = (tmp_path / "errors").read_text()
    assert f"Stopped at step {kept.step}; the same script with GRPO(resume=True, checkpoints=" in said


def test_two_sigterms_leave_the_model_of_the_last_whole_step(tmp_path: Path) -> None:
    with training(tmp_path, steps=500, save_every=1000) as process:
        until(lambda: steps_in(tmp_path) >= 1, process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)

        for one in (process, process, *family):  # as `timeout` does: to its child, and then to the group
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                one.send_signal(signal.SIGTERM)

        process.wait(60)  # what follows `fit` in the script asserts a result, which a stopped run has not
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    notes = json.loads((tmp_path / "model" / "agentlightning.json").read_text())
    assert notes["version"] == latest(tmp_path).progress["version"] >= 1
