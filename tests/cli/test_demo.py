"""`agl demo`: a training that ends, shows what it learned, and leaves what it says it leaves."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.cli import main
from agentlightning.cli.demo import _part
from agentlightning.utils.installation import install_command

PATIENCE_SECONDS = 240
HELD_OUT_TASKS = 8
WITH_FEW_TASKS = f"""
import sys
from agentlightning.cli import demo, main
demo.HELD_OUT_TASKS = {HELD_OUT_TASKS}
sys.exit(main(["demo", *sys.argv[1:]]))
"""
"""The command, but for how long it measures before and after."""


def demo(*options: str) -> str:
    command = [sys.executable, "-c", WITH_FEW_TASKS, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
def test_demo_shows_before_and_after_and_goes_on_from_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demo trains a model")
    from agentlightning.engine.checkpoint import load

    shown = demo("--folder", str(tmp_path / "calc"), "--steps", "1")

    assert f"Reward on {HELD_OUT_TASKS} held-out tasks" in shown
    assert shown.count("before (reward 0.0)") >= 1
    assert f"Steps: 1. Rollouts: {128 + 2 * HELD_OUT_TASKS}, with {2 * HELD_OUT_TASKS} for validation." in shown
    assert f"agl serve {tmp_path / 'calc' / 'model'}" in shown.replace("\n", "")
    assert (tmp_path / "calc" / "runs.db").is_file()
    model, _ = load(str(tmp_path / "calc" / "model"))
    assert model.vocab_size > 0

    events = [
        json.loads(line)
        for line in demo("--folder", str(tmp_path / "calc"), "--steps", "2", "--resume", "--json").splitlines()
    ]

    assert [event["event"] for event in events[-2:]] == ["summary", "verdict"]
    assert (
        sorted(path.name for path in (tmp_path / "calc" / "checkpoints" / "tiny").glob("step-*"))[-1] == "step-000002"
    )


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demo trains a model")
    command = [sys.executable, "-m", "agentlightning.cli", "demo", "--folder", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if json.loads(line)["event"] == "rollout")

        process.send_signal(signal.SIGINT)

        _, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    has_checkpoint = any(tmp_path.glob("checkpoints/**/step-*"))  # one that was being written may be done
    assert (f"go on with: agl demo --folder {tmp_path} --resume" in told) == has_checkpoint
    assert (f"begin again with: agl demo --folder {tmp_path}" in told) != has_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_training_of_the_example_is_a_script_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the example trains a model")
    script = Path(_part("tasks").__file__ or "").parent / "train.py"
    command = [sys.executable, str(script), "--steps", "1", "--held-out", "8", "--folder", "calc"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    assert "held-out reward before: 0." in done.stdout
    assert "held-out reward after:" in done.stdout
    assert (tmp_path / "calc" / "model" / "tiny.json").is_file()


def test_going_on_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the demo trains a model")

    assert main(["demo", "--resume"]) == 1

    assert "--resume needs the --folder" in capsys.readouterr().err


def test_what_is_missing_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert main(["demo"]) == 1

    assert install_command("train", "openai") in capsys.readouterr().err


def test_agent_of_the_demo_does_not_know_us_and_tests_are_apart() -> None:
    tasks = _part("tasks")
    source = Path(_part("calc_agent").__file__ or "").read_text(encoding="utf-8")

    trained = {task["question"] for task in tasks.tasks(20_000, held_out=False, seed=3)}
    tested = {task["question"] for task in tasks.tasks(256, held_out=True)}

    assert "agentlightning" not in source
    assert len(tested) == 256
    assert not trained & tested
