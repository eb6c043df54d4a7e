"""Agents in a shell script and for Node, and a team with one agent trained: one real step of each example."""

import asyncio
import re
import shutil
import sys
from pathlib import Path

import pytest

from agentlightning.adapter import TraceToTrajectory
from agentlightning.store import SqliteLightningStore
from tests import warm_python

pytest.importorskip("torch", reason="the examples train the tiny model")

EXAMPLES = Path(__file__).parents[2] / "examples"
ROLLOUTS = 2 * 8 + 2 * 2
"""A step with two groups of eight, whose rewards are all the same once in ten thousand runs, and two validations."""


def run_example(name: str, folder: Path, long: str, *arguments: str) -> str:
    """What a copy of the example prints whose steps are small; `long` is where its program sets the size of a step."""
    program = shutil.copytree(EXAMPLES / name, folder / name) / "train.py"
    code = program.read_text(encoding="utf-8")
    assert long in code
    program.write_text(code.replace(long, "steps=options.steps, tasks_per_step=2, group_size=8"), encoding="utf-8")
    store = f"sqlite:///{folder / 'runs.db'}"
    command = [sys.executable, str(program), *arguments, "--steps", "1", "--held-out", "2", "--store", store]
    return warm_python.run(command, check=True, timeout=120, kind=warm_python.TorchPopen).stdout


async def steps_and_sequences(path: Path) -> tuple[list[int], int, int]:
    """Steps that the run has metrics of, rollouts that succeeded, and sequences of one of them."""
    async with SqliteLightningStore(path) as store:
        (run,) = await store.query_runs()
        points = await store.query_metrics(run.run_id, names=["learner/loss"])
        done = await store.query_rollouts(status_in=["succeeded"])
        spans = await store.query_spans(done[0].rollout_id)
    return [point.step for point in points], len(done), len(TraceToTrajectory().adapt(spans).sequences)


@pytest.mark.parametrize(("language", "program"), [("sh", "curl"), ("node", "node")])
def test_a_program_in_another_language_is_trained(language: str, program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")

    printed = run_example("any_language", tmp_path, "steps=options.steps, tasks_per_step=6", language)

    assert re.search(r"even numbers after:  [\d.]+ \[", printed)
    assert asyncio.run(steps_and_sequences(tmp_path / "runs.db")) == ([1], ROLLOUTS, 1)


def test_one_agent_of_two_is_trained(tmp_path: Path) -> None:
    printed = run_example("multi_agent", tmp_path, "steps=options.steps")

    assert f"{{'solver': {ROLLOUTS}, 'editor': {ROLLOUTS}}}" in printed
    assert asyncio.run(steps_and_sequences(tmp_path / "runs.db")) == ([1], ROLLOUTS, 2)
