"""The `agl` command."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.cli import store as store_command
from agentlightning.store import SqliteLightningStore


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with SqliteLightningStore(tmp_path / "s.db") as store:
            for n in range(3):
                await store.enqueue_rollout(n)

    asyncio.run(fill())
    return tmp_path / "s.db"


def test_status_shows_what_the_store_holds(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "status", str(store_path)]) == 0

    assert "total_rollouts" in (shown := capsys.readouterr().out)
    assert "queue_length" in shown


@pytest.mark.parametrize(("verb", "field"), [("status", "total_rollouts"), ("export", "rollout")])
def test_data_may_be_answered_as_json(
    verb: str, field: str, store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / "a.jsonl")] if verb == "export" else []

    assert main(["store", verb, "--json", str(store_path), *files]) == 0

    assert json.loads(capsys.readouterr().out)[field] == 3


def test_export_and_import_carry_a_store(store_path: Path, tmp_path: Path) -> None:
    archive, copy = tmp_path / "a.jsonl", tmp_path / "t.db"

    assert main(["store", "export", str(store_path), str(archive)]) == 0
    assert main(["store", "import", str(copy), str(archive)]) == 0

    assert json.loads(archive.read_text().splitlines()[-1]) == {
        "kind": "end",
        "value": {"rollout": 3, "sequence": 3, "queued": 3},
    }
    assert asyncio.run(inputs(copy)) == [0, 1, 2]


def test_backup_makes_a_store(store_path: Path, tmp_path: Path) -> None:
    assert main(["store", "backup", str(store_path), str(tmp_path / "copy.db")]) == 0

    assert asyncio.run(inputs(tmp_path / "copy.db")) == [0, 1, 2]


async def inputs(path: Path) -> list[Any]:
    async with SqliteLightningStore(path) as store:
        return [rollout.input for rollout in await store.query_rollouts()]


@pytest.mark.parametrize("options", [[], ["--path", "s.db"]], ids=["memory", "sqlite"])
def test_patience_with_silent_workers_reaches_the_served_store(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    store: Any = store_command.chosen_store(
        store_command.main.parser().parse_args([*options, "--lost-worker-seconds", "7.5"])
    )

    assert store._limits.lease_seconds == 7.5


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2

    assert "commands:" in capsys.readouterr().out


def test_module_runs_as_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "agentlightning.cli", "--version"], capture_output=True, text=True, check=True
    )

    assert shown.stdout.startswith("agentlightning ")
