"""The programs of the tutorial "Bring the agent that you have": each trains a real model behind its framework.

The environments of the frameworks have no torch. It is taken from that of the other tests, behind all packages of the
framework's own.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.adapter import TraceToTrajectory
from agentlightning.store import SqliteLightningStore
from tests import tutorials

RUNS_IN = ("openai2",)

PROGRAMS = tutorials.programs_of("bring-your-agent.md")
TORCH = Path(__file__).parents[2] / ".venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a program that finds torch, and keeps its files to itself."""
    if not (TORCH / "torch").is_dir() and importlib.util.find_spec("torch") is None:
        pytest.skip(f"there is no torch in {TORCH}; `make setup` installs it")
    folder = tmp_path_factory.mktemp("environment")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(TORCH)!r})\n", encoding="utf-8")
    own = {"PYTHONPATH": str(folder), "XDG_DATA_HOME": str(folder), "CREWAI_TRACING_ENABLED": "false"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    return {**kept, **own}


async def outcome(path: Path) -> tuple[list[int], int, set[int]]:
    """The steps that were made, how many rollouts succeeded, and how many sequences each of them has."""
    async with SqliteLightningStore(path) as store:
        (run,) = await store.query_runs()
        points = await store.query_metrics(run.run_id, names=["reward/mean"])
        done = await store.query_rollouts(status_in=["succeeded"])
        traces = [await store.query_spans(rollout.rollout_id) for rollout in done]
    return (
        [point.step for point in points],
        len(done),
        {len(TraceToTrajectory().adapt(one).sequences) for one in traces},
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_tutorial_trains_its_model(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(tutorials.shortened(PROGRAMS[name]), encoding="utf-8")

    command = [sys.executable, name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    assert tutorials.LAST_LINE.search(done.stdout.strip()), done.stdout
    assert asyncio.run(outcome(tmp_path / "runs.db")) == ([1], tutorials.ROLLOUTS, {1})


def test_the_tutorial_has_every_framework() -> None:
    assert len(PROGRAMS) == 5
