"""The legacy example, run as a user runs it: in one command, and as server and client side by side."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_python

FOLDER = Path(__file__).parents[2] / "examples" / "apo"
WINNER = "winner: What is {a} plus {b}? Answer with the number only."
TASKS = 18
STRICT = {**os.environ, "PYTHONWARNINGS": "error,default::DeprecationWarning"}
"""The processes of the example inherit it: every warning is an error, except the documented ones."""


@pytest.fixture(scope="module")
def done() -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(FOLDER / "legacy_apo_server.py"), "--clients", "2"]
    return warm_python.run(command, check=True, timeout=60, env=STRICT)


@pytest.mark.claim(268, 509)
def test_it_names_the_winner(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.stdout.splitlines()[-1] == WINNER
    assert "0.00  What is {a} plus {b}?\n1.00  What is" in re.sub(r"client: .*\n", "", done.stdout)


def test_its_clients_did_every_task_once_and_stopped(done: "subprocess.CompletedProcess[str]") -> None:
    counts = [int(count) for count in re.findall(r"client: (\d+) tasks", done.stdout)]

    assert len(counts) == 2
    assert sum(counts) == TASKS + len(counts)


def test_each_process_prints_the_documented_warning_only(done: "subprocess.CompletedProcess[str]") -> None:
    warnings = re.findall(r"DeprecationWarning: (\w+)", done.stderr)

    assert sorted(warnings) == ["AgentLightningClient", "AgentLightningClient", "AgentLightningServer"]
    assert "Error" not in done.stderr


def test_a_client_of_another_terminal_is_served_and_told_to_stop() -> None:
    command = [sys.executable, str(FOLDER / "legacy_apo_server.py"), "--clients", "0"]
    with warm_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=STRICT) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().split()[-1]
        client = [sys.executable, str(FOLDER / "legacy_apo_client.py"), endpoint]
        worked = warm_python.run(client, check=True, timeout=60, env=STRICT)
        printed, _ = server.communicate(timeout=60)

    assert worked.stdout == f"client: {TASKS + 1} tasks\n"
    assert printed.splitlines()[-1] == WINNER
