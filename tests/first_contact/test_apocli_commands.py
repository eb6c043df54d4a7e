"""The first hour with the command line: what is nearly right is understood, and nothing is left behind unasked."""

import argparse
import asyncio
import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import COMMANDS, main, module_of
from agentlightning.store import SqliteLightningStore
from tests import warm_python


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("AGL_STORE_TOKEN", "AGL_PROXY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def make_store(path: Path, tasks: int) -> None:
    async def fill() -> None:
        async with SqliteLightningStore(path) as store:
            for number in range(tasks):
                await store.enqueue_rollout(number)

    asyncio.run(fill())


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Those of all commands and of all their verbs."""
    for command in COMMANDS:
        module: Any = importlib.import_module(module_of(command))
        parser = module.main.parser()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()


def test_the_help_of_every_command_and_verb_has_an_example() -> None:
    without = [parser.prog for parser in parsers() if parser.prog not in (parser.epilog or "")]

    assert without == []


def test_a_run_leaves_its_store_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--", "true"]) == 0

    assert [path.name for path in folder.iterdir()] == ["agentlightning.db"]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "recorded in" in line]
    assert "agentlightning.db" in line


@pytest.mark.parametrize("verb", ["backup", "export"])
def test_a_file_is_replaced_only_by_force(verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(folder / "one.db", 1)
    assert main(["store", verb, "one.db", "copy"]) == 0
    make_store(folder / "three.db", 3)
    before = (folder / "copy").read_bytes()

    refused = main(["store", verb, "three.db", "copy"])

    assert (refused, (folder / "copy").read_bytes() == before) == (1, True)
    assert "'copy' exists; give another path, or --force" in capsys.readouterr().err
    assert main(["store", verb, "--force", "three.db", "copy"]) == 0
    assert (folder / "copy").read_bytes() != before


@pytest.mark.parametrize(
    "arguments",
    [
        ["store", "--port", "0"],
        ["dashboard", "one.db", "--no-browser"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_ctrl_c_ends_a_command_with_one_line(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(folder / "one.db", 1)
    (folder / "figures").mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "figures")
    output = folder / "output"
    with output.open("w") as stream:
        command = [sys.executable, "-m", "agentlightning.cli", *arguments]
        process = warm_python.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        given_up = time.monotonic() + 60
        while "Ctrl-C" not in output.read_text() and process.poll() is None:
            assert time.monotonic() < given_up
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()

    shown = output.read_text()
    assert code == 130, shown
    assert shown.splitlines()[-1] == f"agl {arguments[0]}: Stopped by Ctrl-C."
    assert "Traceback" not in shown
