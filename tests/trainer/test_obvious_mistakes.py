"""What a newcomer gets wrong at first, and the sentence that says what to do instead."""

import os
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.runner.failures import FailureNote
from agentlightning.trainer.views import dashboard_command, main_figures


class Question(BaseModel):
    text: str


def agent(task: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "options", "meant"),
    [
        ("Trainer", {"n_runner": 4}, "n_runners"),
        ("GRPO", {"model": "tiny", "step": 12}, "steps"),
        ("SFT", {"checkpoint": "here"}, "checkpoints"),
        ("APO", {"beam_round": 2}, "beam_rounds"),
        ("GEPA", {"iteration": 2}, "iterations"),
        ("LLMProxy", {"models_list": []}, "model_list"),
        ("OptimisationBudget", {"rollout": 2}, "rollouts"),
        ("LitAgentRunner", {"max_concurency": 8}, "max_concurrency"),
        ("ClientServerExecutionStrategy", {"n_runner": 2}, "n_runners"),
        ("OtelTracer", {"instruments": False}, "instrument"),
        ("SqliteLightningStore", {"max_attempt_span": 1}, "max_attempt_spans"),
    ],
)
def test_a_misspelt_argument_is_answered_with_the_one_that_was_meant(
    name: str, options: dict[str, Any], meant: str
) -> None:
    if name in ("GRPO", "SFT"):
        pytest.importorskip("torch")
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected .*; did you mean '{meant}'\?"):
        getattr(agl, name)(**options)


@pytest.mark.parametrize(
    ("path", "argument", "meant"),
    [
        ("agentlightning.algorithm.grpo:SampleSettings", "skip_truncate", "skip_truncated"),
        ("agentlightning.algorithm.grpo:LearnerSettings", "learning_rat", "learning_rate"),
        ("agentlightning.algorithm.sft:Acceptance", "min_rewards", "min_reward"),
        ("agentlightning.algorithm.sft:FittingSettings", "epoch", "epochs"),
        ("agentlightning.algorithm.sentinel:Sentinel", "rewards", "reward"),
        ("agentlightning.engine.model:LoraOptions", "rnk", "rank"),
        ("agentlightning.engine.vllm:VllmOptions", "gpu_memory_utilisation", "gpu_memory_utilization"),
    ],
    ids=lambda value: value.rpartition(":")[2],
)
def test_so_is_one_of_the_settings_within(path: str, argument: str, meant: str) -> None:
    pytest.importorskip("torch")
    settings = pkgutil.resolve_name(path)

    with pytest.raises(TypeError, match=f"'{argument}'; did you mean '{meant}'"):
        settings(**{argument: 1})


def test_an_argument_like_no_other_is_answered_with_all_of_them() -> None:
    with pytest.raises(TypeError, match=r"'zzz'; it takes .*n_runners"):
        agl.Trainer(zzz=1)  # type: ignore[call-arg] # wrong on purpose


def test_the_short_name_of_an_algorithm_is_answered_with_its_class() -> None:
    with pytest.raises(ValueError, match=r"'grpo'; give an instance such as agl\.GRPO\(\.\.\.\)"):
        agl.Trainer(algorithm="grpo")


def test_a_record_within_a_row_is_refused_with_the_way_out(tmp_path: Path) -> None:
    trainer = agl.Trainer(store=f"sqlite:///{tmp_path}/runs.db")

    with pytest.raises(ValueError, match=r"model_dump\(\)"):
        trainer.dev(agent, [{"nested": Question(text="why")}])
    trainer.dev(agent, [Question(text="why")])  # which is a row itself


def test_a_failed_connection_names_the_address_and_no_secret() -> None:
    error = ConnectionError("Connection error.")
    error.request = httpx.Request("POST", "http://user:pass@127.0.0.1:9/v1/chat?key=1")  # type: ignore[attr-defined]

    assert FailureNote.of(error).message == "Connection error. (http://127.0.0.1:9/v1/chat did not answer)"
    assert FailureNote.of(ConnectionError("gone")).message == "gone"
    assert FailureNote.of(httpx.ReadTimeout("late")).message == "late"


def test_dev_says_how_to_look_at_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agl.Trainer(store=f"sqlite:///{tmp_path}/mine.db").dev(agent, ["a"])

    assert capsys.readouterr().out.splitlines()[-1] == f"look at it: {dashboard_command(f'{tmp_path}/mine.db')}"


@pytest.mark.parametrize("has_model", [True, False])
def test_dev_of_a_program_says_how_its_calls_are_recorded_where_it_has_a_model(
    has_model: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    if has_model:
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")

    agl.Trainer().dev(agl.CommandAgent([sys.executable, "-c", "print(1)"]), ["a"])

    shown = capsys.readouterr().out
    assert f"No model call of '{sys.executable}' was recorded." in shown
    assert ("agl eval URL" in shown) == has_model


def test_agl_is_named_by_its_path_where_the_shell_would_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / ".venv" / "bin" / "agl"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", os.devnull)

    assert dashboard_command("runs.db") == ".venv/bin/agl dashboard runs.db"
    monkeypatch.setenv("PATH", str(program.parent))
    assert shutil.which("agl")
    assert dashboard_command("runs.db") == "agl dashboard runs.db"


def test_the_line_of_a_step_that_learned_nothing_says_why() -> None:
    step = {"reward/mean": 0.0, "skipped/no_reward": 0.0, "skipped/no_variance": 16.0, "seconds": 2.0, "other": 1.0}

    assert list(main_figures(step))[:2] == ["reward/mean", "skipped/no_variance"]
    assert "skipped/no_reward" not in main_figures(step)
    assert list(main_figures({**step, "learner/loss": 0.1}))[:2] == ["reward/mean", "learner/loss"]
