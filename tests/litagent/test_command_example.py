"""The example of a program as an agent, run as a user runs it."""

import sys
from pathlib import Path

from tests import warm_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "command_agent" / "train.py"


def test_the_better_prompt_wins() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    done = warm_python.run(command, check=True, timeout=100)

    assert done.stdout == (
        "0.00  What is {question}?\n"
        "1.00  What is {question}? Answer with the number alone.\n"
        "winner: What is {question}? Answer with the number alone.\n"
    )
    assert "Exception ignored" not in done.stderr
