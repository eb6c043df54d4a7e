"""The example of an optimised room selector, run as a user runs it, without a key."""

import json
import os
import sys
from pathlib import Path

import pytest

from agentlightning.types import PromptTemplate
from tests import warm_python

FOLDER = Path(__file__).parents[2] / "examples" / "apo_room_selector"


def run_example(*arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(FOLDER / "optimise.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    done = warm_python.run(command, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_optimises_tells_the_end_and_goes_on_from_its_state(tmp_path: Path) -> None:
    output, state = tmp_path / "best.json", tmp_path / "run.jsonl"
    arguments = ["--rounds", "1", "--rollouts", "260", "--output", str(output), "--state", str(state)]

    said = run_example(*arguments)
    lines = len(state.read_text(encoding="utf-8").splitlines())
    again = run_example(*arguments)

    written = json.loads(output.read_text(encoding="utf-8"))
    assert "Validation score: 0." in said
    assert "v0   seed" in said
    assert "{request}" in PromptTemplate(**written["prompts"]["prompt"]).template
    assert written["spent"]["rollouts"] <= 260
    assert again == said
    assert len(state.read_text(encoding="utf-8").splitlines()) == lines
