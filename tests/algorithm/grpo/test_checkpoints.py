"""Checkpoints: that they come back as they were, that few are kept, and that none is ever half there."""

import json
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentlightning.algorithm.grpo.checkpoints import Checkpoint, Checkpoints
from agentlightning.errors import ConfigurationError, TrainingError
from tests import warm_python

SAVERS = Path(__file__).with_name("killed_savers.py")


def save(checkpoints: Checkpoints, step: int, *, value: float | None = None, is_best: bool = False) -> Path:
    return checkpoints.save(
        step,
        model_state={"weight": torch.full((3, 2), value if value is not None else float(step))},
        learner_state={"steps": step, "moments": [torch.ones(4)]},
        progress={"position": step * 10},
        is_best=is_best,
    )


def folders(checkpoints: Checkpoints) -> list[str]:
    return sorted(name for name in os.listdir(checkpoints.folder) if name.startswith("step-"))


def found(checkpoint: Checkpoint | None) -> Checkpoint:
    assert checkpoint is not None
    return checkpoint


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path / "run"), 40)

    latest = found(Checkpoints(tmp_path / "run").latest())

    assert (latest.folder, latest.step, latest.progress) == (folder, 40, {"position": 400})
    assert torch.equal(latest.model_state()["weight"], torch.full((3, 2), 40.0))
    assert latest.learner_state()["steps"] == 40
    assert torch.equal(latest.learner_state()["moments"][0], torch.ones(4))
    assert sorted(os.listdir(folder)) == ["model.safetensors", "optimiser.pt", "state.json"]
    assert (tmp_path / "run" / "latest").read_text() == "step-000040\n"


def test_others_may_read_what_is_saved(tmp_path: Path) -> None:
    folder = save(Checkpoints(tmp_path), 1)
    modes = {path.name: path.stat().st_mode & 0o044 for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o055 != 0
    assert set(modes.values()) == {0o044}


def test_where_nothing_was_saved_there_is_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    assert not (tmp_path / "run").exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)

    for step in range(1, 8):
        save(checkpoints, step, is_best=step in (1, 3))

    assert folders(checkpoints) == ["step-000003", "step-000006", "step-000007"]
    assert found(checkpoints.latest()).step == 7
    assert found(checkpoints.best()).step == 3


def test_a_step_that_is_saved_again_gives_what_was_saved_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)

    save(checkpoints, 1)
    for value in (1.0, 2.0, 3.0):
        save(checkpoints, 2, value=value)

    assert found(checkpoints.latest()).model_state()["weight"][0, 0] == 3
    assert folders(checkpoints) == ["step-000001", "step-000002-3"]


def test_a_best_one_that_is_saved_again_stays_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)

    save(checkpoints, 2, is_best=True)
    save(checkpoints, 2)
    save(checkpoints, 3)

    assert found(checkpoints.best()).step == 2


def test_a_run_that_went_back_goes_on_from_where_it_is_and_any_step_can_be_asked_for(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (90, 5, 6):
        save(checkpoints, step)
    save(checkpoints, 6, value=7.0)

    assert folders(checkpoints) == ["step-000005", "step-000006-2", "step-000090"]
    assert found(checkpoints.latest()).step == 6
    assert checkpoints.steps() == [6, 5, 90]
    assert found(checkpoints.at(5)).progress == {"position": 50}
    assert found(checkpoints.at(6)).model_state()["weight"][0, 0] == 7
    assert checkpoints.at(4) is None


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *(("model.safetensors", damage) for damage in ("cut", "changed", "missing", "empty")),
        *(("optimiser.pt", "changed"), ("state.json", "cut"), ("state.json", "missing")),
    ],
)
def test_one_that_is_not_whole_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    path = save(checkpoints, 2) / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        torn = {"cut": content[:-1], "changed": bytes([content[0] ^ 1]) + content[1:], "empty": b""}
        path.write_bytes(torn[damage])

    assert found(checkpoints.latest()).step == 1
    assert "step-000002" in caplog.text
    assert "not whole" in caplog.text


@pytest.mark.parametrize("content", [b"", b"step-000009\n", b"../../etc", b"\xff\xfe"], ids=repr)
def test_a_pointer_that_leads_nowhere_is_no_harm(tmp_path: Path, content: bytes) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    (tmp_path / "latest").write_bytes(content)

    assert found(checkpoints.latest()).step == 2


def test_sources_of_chance_go_on_where_they_were(tmp_path: Path) -> None:
    python, torch_state = random.getstate(), torch.get_rng_state()
    try:
        save(Checkpoints(tmp_path), 1)
        expected = (random.random(), torch.rand(3).tolist())

        found(Checkpoints(tmp_path).latest()).restore_random_sources()

        assert (random.random(), torch.rand(3).tolist()) == expected
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)


def test_weights_that_share_memory_are_saved(tmp_path: Path) -> None:
    tied = torch.randn(4, 3)

    Checkpoints(tmp_path).save(1, model_state={"a": tied, "b": tied.T}, learner_state={}, progress={})

    state = found(Checkpoints(tmp_path).latest()).model_state()
    assert torch.equal(state["a"], tied)
    assert torch.equal(state["b"], tied.T)


@pytest.mark.parametrize("wrong", [{"when": object()}, {1j: 2}], ids=["value", "key"])
def test_progress_that_is_not_json_is_refused_and_leaves_nothing(tmp_path: Path, wrong: Any) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    with pytest.raises(TrainingError, match="progress of step 2"):
        checkpoints.save(2, model_state={}, learner_state={}, progress=wrong)

    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000001"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(TrainingError, match=r"step 1 .*run"):
        save(Checkpoints(tmp_path / "run"), 1)


@pytest.mark.parametrize("kilobytes", [0, 6], ids=["weights", "optimiser"])
def test_a_full_disk_is_named_with_what_is_free_and_the_others_stay(tmp_path: Path, kilobytes: int) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    save(checkpoints, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = torch.zeros(100_000)

    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, before[1]))
    try:
        with pytest.raises(
            TrainingError, match=r"step 2 cannot be written to '.*run/step-000002' \(\d+ bytes are free"
        ):
            checkpoints.save(2, model_state={"w": large[:9]}, learner_state={"m": large}, progress={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert found(checkpoints.latest()).step == 1


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(SAVERS), str(tmp_path), "7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    done = warm_python.run(command, env=environment, timeout=100, kind=warm_python.TorchPopen)

    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) == 20
    assert all(kill["is_right"] for kill in kills), kills
    assert all(kill["found"] in (kill["saved"], kill["saved"] + 1) for kill in kills), kills
    assert sum(kill["unfinished"] > 0 for kill in kills) >= 4, kills  # in the middle of saving, not between
