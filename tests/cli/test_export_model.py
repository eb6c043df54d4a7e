"""`agl export-model`: from a checkpoint, or a model, to a folder that can be served."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="models need torch")

from agentlightning.algorithm.grpo import Checkpoints  # noqa: E402 # after the check for torch
from agentlightning.cli import main  # noqa: E402
from agentlightning.engine.checkpoint import load  # noqa: E402


def shifted(by: float) -> dict[str, Any]:
    model, _ = load("tiny")
    return {name: tensor + by for name, tensor in model.state().items()}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Of one policy: steps 1 (the best), 2 and 3, whose weights are moved by as much."""
    kept = Checkpoints(tmp_path / "run" / "tiny", keep=3)
    for step in (1, 2, 3):
        progress = {"model": "tiny", "version": step, "best": 0.5}
        kept.save(step, model_state=shifted(step), learner_state={}, progress=progress, is_best=step == 1)
    return tmp_path / "run"


def is_of_step(folder: Path, step: int) -> bool:
    model, _ = load(str(folder))
    wanted = shifted(step)
    return all(torch.equal(tensor, wanted[name]) for name, tensor in model.state().items())


@pytest.mark.parametrize(
    ("options", "step"), [([], 3), (["--best"], 1), (["--step", "2"], 2)], ids=["newest", "best", "step"]
)
def test_chosen_checkpoint_is_written(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], step: int
) -> None:
    out = tmp_path / "out"

    assert main(["export-model", str(checkpoints), str(out), *options]) == 0

    assert is_of_step(out, step)
    assert json.loads((out / "agentlightning.json").read_text())["step"] == step
    assert f"step {step}" in capsys.readouterr().out


def test_model_is_copied_over_another_model(checkpoints: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["export-model", str(checkpoints / "tiny"), str(first)]) == 0
    assert main(["export-model", str(checkpoints), str(second), "--step", "1"]) == 0

    assert main(["export-model", str(first), str(second)]) == 0

    assert is_of_step(second, 3)


def test_model_of_the_package_is_exported_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export-model", "tiny", str(tmp_path / "out")]) == 0

    assert is_of_step(tmp_path / "out", 0)
    assert "the model 'tiny'" in capsys.readouterr().out
    assert main(["export-model", "tiny", str(tmp_path / "out"), "--best"]) == 1
    assert "has no checkpoints" in capsys.readouterr().err


def test_one_of_several_models_is_named(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Checkpoints(checkpoints / "solver")
    kept.save(7, model_state=shifted(7), learner_state={}, progress={"model": "tiny"})

    assert main(["export-model", str(checkpoints), str(tmp_path / "out")]) == 1
    assert "solver, tiny; choose one" in capsys.readouterr().err
    assert main(["export-model", str(checkpoints), str(tmp_path / "out"), "--policy", "solver"]) == 0
    assert is_of_step(tmp_path / "out", 7)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("run", ["--step", "9"], "does not have step 9; there are the steps 1, 2, 3"),
        ("run", ["--policy", "planner"], "choose one of these with --policy"),
        ("run/tiny/step-000001", [], "neither checkpoints"),
        ("run", ["--dtype", "bfloat16"], "32 bits alone"),
    ],
    ids=["no_such_step", "no_such_policy", "inside_a_checkpoint", "tiny_in_16_bits"],
)
def test_what_cannot_be_exported_is_told(
    checkpoints: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    options: list[str],
    words: str,
) -> None:
    assert main(["export-model", str(tmp_path / source), str(tmp_path / "out"), *options]) == 1

    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folder_with_something_else_is_left_alone(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")

    assert main(["export-model", str(checkpoints), str(tmp_path / "out")]) == 1
    assert main(["export-model", str(checkpoints), str(checkpoints)]) == 1

    assert "something else than a model" in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    assert (checkpoints / "tiny").is_dir()


def test_checkpoint_that_does_not_name_its_model_needs_a_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpoints(tmp_path / "run").save(1, model_state=shifted(1), learner_state={}, progress={})
    command = ["export-model", str(tmp_path / "run"), str(tmp_path / "out")]

    assert main(command) == 1
    assert "name it with --base" in capsys.readouterr().err
    assert main([*command, "--base", "tiny"]) == 0
    assert is_of_step(tmp_path / "out", 1)


def test_hugging_face_model_is_written_exactly_or_in_16_bits_on_request(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face models need transformers: the extra hf")
    from tests.engine.small_llama import save_small_llama, word_tokenizer

    base = save_small_llama(tmp_path / "base", word_tokenizer(), dtype="bfloat16")
    trained = {name: tensor + 1e-5 for name, tensor in load(str(base), device="cpu")[0].state().items()}
    Checkpoints(tmp_path / "run").save(1, model_state=trained, learner_state={}, progress={"model": str(base)})

    assert main(["export-model", str(tmp_path / "run"), str(tmp_path / "exact")]) == 0
    assert main(["export-model", str(tmp_path / "run"), str(tmp_path / "small"), "--dtype", "bfloat16"]) == 0

    exact, small = (load(str(tmp_path / name), device="cpu")[0].state() for name in ("exact", "small"))
    assert all(torch.equal(tensor, exact[name]) for name, tensor in trained.items())
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in small.values())
    change = torch.cat([(small[name] - tensor).flatten() for name, tensor in trained.items()])
    assert abs(change.mean().item()) < 5e-6
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "bfloat16"
