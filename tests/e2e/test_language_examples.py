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


def run_example(path: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / path), *arguments, "--steps", "1", "--held-out", "4"]
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
    path = tmp_path / "runs.db"

    printed = run_example("any_language/train.py", language, "--store", f"sqlite:///{path}")

    assert re.search(r"even numbers after:  [\d.]+ \[", printed)
    assert asyncio.run(steps_and_sequences(path)) == ([1], 48 + 2 * 4, 1)


def test_one_agent_of_two_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    printed = run_example("multi_agent/train.py", "--store", f"sqlite:///{path}")

    assert "{'solver': 100, 'editor': 100}" in printed
    assert asyncio.run(steps_and_sequences(path)) == ([1], 128 + 2 * 4, 2)
