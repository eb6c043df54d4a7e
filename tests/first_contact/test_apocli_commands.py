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

from agentlightning.cli import COMMANDS, main
from agentlightning.store import SqliteLightningStore
from tests import warm_python

MODULES = {"agentops": "agentops_server", "eval": "evaluate", "export-model": "export_model"}


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


def count_of(path: Path) -> int:
    async def counted() -> int:
        async with SqliteLightningStore(path) as store:
            return (await store.query_rollouts(limit=0)).total

    return asyncio.run(counted())


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Those of all commands and of all their verbs."""
    for command in COMMANDS:
        module: Any = importlib.import_module(f"agentlightning.cli.{MODULES.get(command, command)}")
        parser = module.COMMAND.parser()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()


def test_the_help_of_every_command_and_verb_has_an_example() -> None:
    without = [parser.prog for parser in parsers() if parser.prog not in (parser.epilog or "")]

    assert without == []


def test_a_command_that_is_nearly_right_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])

    assert capsys.readouterr().err == "agl: there is no command 'trian'; did you mean `agl demo`? See `agl --help`.\n"


def test_an_option_that_is_nearly_right_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["store", "--prot", "5000"])

    shown = capsys.readouterr().err
    assert shown == "agl store: there is no option --prot; did you mean --port? See `agl store --help`.\n"


@pytest.mark.slow
def test_an_agent_that_always_fails_is_one_line_of_an_evaluation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "failing_agent.py").write_text("def agent(task):\n    raise ValueError('not this one')\n")
    (folder / "tasks.jsonl").write_text("1\n")
    monkeypatch.syspath_prepend(folder)

    code = main(
        ["eval", "http://127.0.0.1:1/v1", "--model", "m", "--agent", "failing_agent:agent", "--data", "tasks.jsonl"]
    )

    shown = capfd.readouterr().err
    assert (code, "Traceback" in shown) == (1, False), shown
    assert "agl eval: None of 1 rollouts gave a reward; most often: ValueError: not this one" in shown


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


def test_a_backup_by_force_is_the_new_store(folder: Path) -> None:
    make_store(folder / "one.db", 1)
    make_store(folder / "three.db", 3)

    assert main(["store", "backup", "--force", "three.db", "one.db"]) == 0

    assert count_of(folder / "one.db") == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["store", "--port", "0"],
        ["dashboard", "one.db", "--no-browser"],
        ["proxy", "--model", "m=http://127.0.0.1:1/v1", "--port", "0"],
        ["prometheus", "--port", "0"],
        ["agentops", "--port", "0"],
        ["runner", "--store", "http://127.0.0.1:9", "own_agent:agent"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_ctrl_c_ends_a_command_with_one_line(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(folder / "one.db", 1)
    (folder / "own_agent.py").write_text("def agent(task):\n    return 1.0\n")
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
