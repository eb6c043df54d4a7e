"""`agl why` and `agl doctor`: what a run gained, what became of a rollout, and how the installation is."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from agentlightning.cli import doctor, main
from agentlightning.store import SqliteLightningStore
from tests.verdict.recorded import Recorded


@pytest.fixture
async def recorded(tmp_path: Path) -> tuple[Path, str]:
    """A store with a run in which no answer was ever right, and the id of one of its rollouts."""
    path = tmp_path / "runs.db"
    async with SqliteLightningStore(path) as store:
        run = await Recorded(store).begin()
        for step in range(4):
            await run.group([0.0] * 4, step=step)
        await run.metrics({"samples/used": 0.0, "reward/min": 0.0, "reward/max": 0.0})
        await run.end()
        return path, (await store.query_rollouts(limit=1))[0].rollout_id


def test_the_newest_run_is_explained(recorded: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(recorded[0])]) == 0

    said = capsys.readouterr().out
    assert "Run 'GRPO' (run-1) is 'succeeded'." in said
    assert "no answer was ever right" in said
    assert "Give easier tasks" in said


def test_a_run_is_explained_as_json(recorded: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(recorded[0]), "run-1", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["run_id"], found["outcome"], found["findings"][0]["name"]) == ("run-1", "no gain", "all_wrong")


def test_a_rollout_is_explained(recorded: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", *map(str, recorded)]) == 0

    assert "Its reward is 0." in capsys.readouterr().out


def test_the_installation_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["is_well"]
    assert {"python", "packages", "loopback", "rollout"} <= {check["name"] for check in found["checks"]}


@pytest.mark.parametrize(
    ("version", "limits", "fits"),
    [
        ("2.10.1", [(">=", "2.9")], True),
        ("2.9", [(">=", "2.10")], False),
        ("1.0", [(">=", "1"), ("<", "2")], True),
        ("0.25.0", [(">=", "0.24"), ("<", "0.25")], False),
        ("1.82.7", [("!=", "1.82.7")], False),
        ("2.13.0+cpu", [(">=", "2.10")], True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, limits: list[tuple[str, str]], fits: bool) -> None:
    assert doctor._fits(version, limits) is fits


def test_a_proxy_that_would_catch_local_calls_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    assert main(["doctor"]) == 1

    assert "Set NO_PROXY=127.0.0.1,localhost." in capsys.readouterr().out


def test_extra_that_an_example_needs_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openai" else find(name))

    said = doctor._examples().said

    assert "observe_openai, sql_agent need the extra 'openai' (`pip install" in said
    assert "'train'" not in said


def test_extras_of_the_examples_are_those_that_their_pages_name() -> None:
    named: dict[str, set[str]] = {}
    for page in (Path(__file__).parents[2] / "examples").glob("*/README.md"):
        (line,) = re.findall(r"pip install .*-e (\S+)", page.read_text())[:1]
        for extra in re.findall(r"[\w-]+", line):
            named.setdefault("openai" if extra == "apo" else extra, set()).add(page.parent.name)

    assert named == {extra: set(examples.split(", ")) for extra, (_, examples) in doctor._EXTRAS.items()}
