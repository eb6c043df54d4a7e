"""`agl demo`: a training that ends, shows what it learned, and leaves what it says it leaves."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.cli.demo import example_part
from agentlightning.trainer.views import agl_command
from agentlightning.utils.installation import install_command
from tests import warm_python

PATIENCE_SECONDS = 240
HELD_OUT_TASKS = 4
TASKS_PER_STEP = {1: 8, 3: 2}
GROUP_SIZE = 8
WITH_FEW_TASKS = f"""
import sys
from agentlightning.cli import demo, main
demo.HELD_OUT_TASKS = {HELD_OUT_TASKS}
demo.TASKS_PER_STEP.update({TASKS_PER_STEP})
sys.exit(main(["demo", *sys.argv[1:]]))
"""
"""The command, but for how long it measures before and after, and for the size of a step."""


def demo(*options: str) -> str:
    command = [sys.executable, "-c", WITH_FEW_TASKS, *options]
    done = warm_python.run(command, timeout=PATIENCE_SECONDS, kind=warm_python.TorchPopen)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
def test_demo_shows_before_and_after_and_goes_on_from_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demo trains a model")
    from agentlightning.engine.checkpoint import load

    shown = demo("--folder", str(tmp_path / "calc"), "--steps", "1")

    assert f"{3 * HELD_OUT_TASKS} held-out questions, sampled as in training" in shown
    for phase in ("calls the tool", "right expression", "then uses the result", "solved"):
        assert phase in shown
    assert re.search(r"before  .* \(a (guess|wrong call)\)", shown)
    assert re.search(r"Gain, task by task: [-+]0\.\d+ \[", shown)
    assert f"Steps: 1. Training rollouts: {TASKS_PER_STEP[3] * GROUP_SIZE}." in shown
    assert f"agl serve {tmp_path / 'calc' / 'model'}" in shown.replace("\n", "")
    left = {tmp_path / "calc" / name for name in ("checkpoints", "model", "runs.db")}
    assert {*map(Path, shlex.split(shown.partition("remove it with: rm -r ")[2]))} == left
    assert {*(tmp_path / "calc").iterdir()} == left
    model, _ = load(str(tmp_path / "calc" / "model"))
    assert model.vocab_size > 0

    events = [
        json.loads(line)
        for line in demo("--folder", str(tmp_path / "calc"), "--steps", "2", "--resume", "--json").splitlines()
    ]

    assert [event["event"] for event in events[-3:]] == ["summary", "verdict", "report"]
    check_report(events[-1], steps=2, questions=3)
    assert (
        sorted(path.name for path in (tmp_path / "calc" / "checkpoints" / "tiny").glob("step-*"))[-1] == "step-000002"
    )


def check_report(report: dict[str, Any], *, steps: int, questions: int) -> None:
    """Everything that the tables show is there, of all runs of a training."""
    assert report["temperature"] == 1.0
    for side in ("before", "after"):
        assert report[side]["reward"]["n"] == HELD_OUT_TASKS
        assert set(report[side]["phases"]) == {"calls_tool", "right_expression", "uses_result", "solved"}
    assert {"mean", "low", "high", "verdict"} <= report["gain"].keys()
    assert [point["step"] for point in report["steps"]] == list(range(1, steps + 1))
    assert all({"reward/mean", "calls_tool", "solved"} <= point.keys() for point in report["steps"])
    wrong = report["conversations"][0]["before"]
    assert len(wrong) == questions
    assert {one["kind"] for one in wrong} - {"solved"}


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_the_control_is_trained_with_rewards_by_chance_and_gains_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demo trains a model")

    *_, verdict, report = map(
        json.loads,
        demo(
            "--reward", "random", "--questions", "1", "--steps", "1", "--folder", str(tmp_path), "--json"
        ).splitlines(),
    )

    check_report(report, steps=1, questions=1)
    assert (report["reward"], report["questions"]) == ("random", 1)
    assert verdict["sentence"].startswith("Too short to say what was gained")
    assert 0.2 < report["steps"][0]["reward/mean"] < 0.8  # of 64 coins
    assert report["steps"][0]["solved"] < 0.2


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demo trains a model")
    command = [sys.executable, "-m", "agentlightning.cli", "demo", "--folder", str(tmp_path), "--json"]
    with warm_python.TorchPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if json.loads(line)["event"] == "rollout")

        process.send_signal(signal.SIGINT)

        _, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    has_checkpoint = any(tmp_path.glob("checkpoints/**/step-*"))  # one that was being written may be done
    assert (f"go on with: {agl_command()} demo --folder {tmp_path} --resume" in told) == has_checkpoint
    assert (f"begin again with: {agl_command()} demo --folder {tmp_path}" in told) != has_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_training_of_the_example_is_a_script_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the example trains a model")
    script = shutil.copytree(Path(example_part("tasks").__file__ or "").parent, tmp_path / "example") / "train.py"
    code = script.read_text(encoding="utf-8")
    assert "tasks_per_step=10," in code
    script.write_text(code.replace("tasks_per_step=10,", "tasks_per_step=2,"), encoding="utf-8")
    command = [sys.executable, str(script), "--steps", "1", "--held-out", "4", "--folder", "calc"]

    done = warm_python.run(command, cwd=tmp_path, timeout=PATIENCE_SECONDS, kind=warm_python.TorchPopen)

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
    tasks = example_part("tasks")
    source = Path(example_part("calc_agent").__file__ or "").read_text(encoding="utf-8")

    trained, tested = (
        [question for task in tasks.conversations(count, questions=3, **which) for question in task["questions"]]
        for count, which in ((6_666, {"held_out": False, "seed": 3}), (128, {"held_out": True}))
    )

    assert "agentlightning" not in source
    assert len(set(tested)) == len(tested) == 3 * 128
    assert not set(trained) & set(tested)


@pytest.mark.parametrize(
    ("replies", "reached", "kind"),
    [
        ([("assistant", "12")], "", "a guess"),
        ([("assistant", "7")], "solved", "solved"),
        (
            [("call", "3+4"), ("tool", "7"), ("assistant", "7")],
            "calls_tool right_expression uses_result solved",
            "solved",
        ),
        ([("call", "3+4"), ("tool", "7"), ("assistant", "ok")], "calls_tool right_expression", "result not used"),
        ([("call", "3-4"), ("tool", "-1"), ("assistant", "-1")], "calls_tool uses_result", "a wrong call"),
        ([("call", "3+4"), ("tool", "7"), ("call", "3+4")], "calls_tool right_expression", "result not used"),
        ([("call", "?"), ("tool", "error"), ("assistant", "7")], "calls_tool solved", "solved"),
        ([], "", "a guess"),
    ],
)
def test_phases_are_read_off_a_conversation(replies: list[tuple[str, str]], reached: str, kind: str) -> None:
    phases = example_part("phases")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    messages.append({"role": "user", "content": "3+4?"})
    for role, text in replies:
        function = {"name": "calculator", "arguments": json.dumps({"expression": text})}
        said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
        messages.append(said if role == "call" else {"role": role, "content": text})

    first, outcome = phases.outcomes(messages, {"questions": ["1+1?", "3+4?"], "answers": ["2", "7"]})

    assert first.solved
    assert [phase for phase in phases.PHASES if getattr(outcome, phase)] == reached.split()
    assert outcome.kind == kind


def test_using_the_result_is_counted_among_right_calls_alone() -> None:
    phases = example_part("phases")
    ways = [(True, True, True), (True, True, False), (True, False, True), (False, False, False)]
    found = [phases.Outcome("3+4?", *way, solved=all(way), text="") for way in ways]

    assert phases.shares(found) == {"calls_tool": 0.75, "right_expression": 0.5, "uses_result": 0.5, "solved": 0.25}
    assert phases.shares([]) == dict.fromkeys(phases.PHASES, 0.0)
