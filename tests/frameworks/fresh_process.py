"""Running a piece of a program in a process of its own, where nothing is imported yet."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300


def told_by(program: str, *arguments: str) -> Any:
    """What a program prints last, as JSON; `sys.argv[1:]` are the arguments."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
