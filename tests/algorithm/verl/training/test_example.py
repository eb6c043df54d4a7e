"""The example as it is, with GPUs and the model replaced."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.algorithm.verl.training.test_training import config_in, notes_of

SCRIPT = Path(__file__).parents[4] / "examples" / "calc_x_verl" / "train.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calc_x_verl", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("default")  # verl, Ray and what they import warn of themselves
def test_the_calculator_agent_is_trained_in_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example()
    monkeypatch.setattr(module, "TRAINING_TASKS", 4)
    monkeypatch.setattr(module, "HELD_OUT_TASKS", 1)
    faked = config_in(tmp_path)
    faked["trainer"]["total_training_steps"] = 1

    module.train({**module.CONFIG, **faked, "agentlightning": module.CONFIG["agentlightning"]})

    (rows,) = notes_of(tmp_path, "update")
    assert len({row["fields"]["uid"] for row in rows}) == 2
    assert {tuple(row["fields"]["response_mask"]) for row in rows} == {(1, 1)}
