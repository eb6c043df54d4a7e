"""Runs of GEPA that were killed go on from their state file."""

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm.gepa import GEPA, OptimisationBudget
from agentlightning.algorithm.prompts.evaluation import RunJournal
from agentlightning.store import InMemoryLightningStore
from tests import warm_python
from tests.algorithm.prompts.world import Judge, Writer, evolved, gepa_in, share_of_words

ROOT = Path(__file__).parents[3]
BUDGET = OptimisationBudget(rollouts=260)


def copying(state: Path, copy: Path, at: int) -> Judge:
    """Agents that copy the state file at one of their rollouts: it is what a kill at this moment leaves."""
    count = 0

    def judge(prompts: dict[str, str], task: Any) -> float:
        nonlocal count
        count += 1
        if count == at:
            shutil.copy(state, copy)
        return share_of_words(prompts, task)

    return judge


def outcome(gepa: GEPA) -> tuple[Any, ...]:
    """What must not depend on kills."""
    assert gepa.result is not None
    return gepa.result.best, gepa.result.challenges, list(gepa.candidates), gepa.result.spent["model_calls"]


def rollouts_in(state: Path) -> int:
    """Of the evaluations whose outcome the file holds; its first line tells what run it is."""
    identity = json.loads(state.read_text(encoding="utf-8").splitlines()[0])["identity"]
    steps = RunJournal(state, identity, algorithm="GEPA").items()
    return sum(len(kept) for step, kept in steps if step.startswith("evaluation ") and not step.endswith(" sent"))


@pytest.mark.parametrize("at", [3, 36, 100, 185], ids=lambda at: f"rollout {at}")
async def test_a_killed_run_ends_as_it_would_have_and_repeats_no_finished_evaluation(at: int, tmp_path: Path) -> None:
    state, copy, other = tmp_path / "state", tmp_path / "copy", InMemoryLightningStore()
    whole = await evolved(Writer(), judge=copying(state, copy, at), state_file=state, budget=BUDGET)
    kept = rollouts_in(copy)

    resumed = await evolved(Writer(), store=other, state_file=copy, budget=BUDGET)  # the store is lost as well

    assert whole.result is not None
    assert resumed.result is not None
    assert outcome(resumed)[:3] == outcome(whole)[:3]
    assert kept + len(await other.query_rollouts()) == whole.result.spent["rollouts"]
    assert resumed.result.spent["rollouts"] == whole.result.spent["rollouts"]


async def test_rollouts_that_a_stopped_run_took_back_are_sent_again(tmp_path: Path) -> None:
    state, store = tmp_path / "state", InMemoryLightningStore()
    for _ in range(2):  # stopped twice, at the same place
        task = asyncio.create_task(gepa_in(store, Writer(), state_file=state).run(range(40), range(60)))
        assert await asyncio.wait_for(store.dequeue_rollout("somebody", wait=30), 30) is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    resumed = await evolved(Writer(), store=store, state_file=state)

    fresh = await evolved(Writer())
    assert outcome(resumed) == outcome(fresh)
    (run,) = await store.query_runs(name="gepa")
    assert run.status == "succeeded"


def test_a_process_that_was_killed_is_continued_by_another(tmp_path: Path) -> None:
    def process(name: str, kill_at: int, hash_seed: str) -> int:
        command = [sys.executable, "-m", "tests.algorithm.prompts.killed_run", name, str(kill_at)]
        places = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        done = warm_python.run(command, cwd=tmp_path, env={**os.environ, **places}, timeout=120)
        return done.returncode

    assert process("whole", 0, "1") == 0
    assert process("killed", 75, "2") == -signal.SIGKILL
    assert not (tmp_path / "killed.json").exists()
    assert process("killed", 0, "3") == 0

    killed, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("killed", "whole"))
    assert killed.pop("run_id") != whole.pop("run_id")
    assert killed == whole
