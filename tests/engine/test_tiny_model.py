"""The tiny model: its gradient is right, and weights change hands safely; `test_scheduler` samples from it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentlightning.engine.model import logits_of
from agentlightning.engine.tiny.model import DESCRIPTION_FILE, WEIGHTS_FILE, TinyModel, TinyShape, load_tiny, save_tiny
from agentlightning.errors import EngineError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return TinyModel(TinyShape(width=16, layers=2, heads=2, max_length=64))


def test_gradient_agrees_with_a_finite_difference(model: TinyModel) -> None:
    ids = torch.randint(0, TinyShape.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    selected = torch.ones_like(ids, dtype=torch.bool)
    weight = model.trainable()["blocks.0.attention_in"]

    def value() -> Tensor:
        return logits_of(model, ids, torch.full((2,), 8), selected).square().mean()

    torch.autograd.backward(value())
    assert weight.grad is not None
    direction = weight.grad / weight.grad.norm()
    with torch.no_grad():
        weight += 1e-2 * direction
        above = value()
        weight -= 2e-2 * direction
        below = value()

    assert float((above - below) / 2e-2) == pytest.approx(float(weight.grad.norm()), rel=0.02)


def test_state_is_a_copy_that_training_does_not_change(model: TinyModel) -> None:
    state = model.state()
    before = state["final_norm"].clone()

    with torch.no_grad():
        model.final_norm += 1

    assert torch.equal(state["final_norm"], before)
    assert model.state_shapes() == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_state_of_another_shape_is_refused_and_changes_nothing(model: TinyModel) -> None:
    before = {name: weight.clone() for name, weight in model.state().items()}
    wider = TinyModel(TinyShape(width=32, layers=2, heads=2, max_length=64)).state()

    with pytest.raises(EngineError, match="shape"):
        model.load_state({**before, "final_norm": wider["final_norm"]})
    with pytest.raises(EngineError, match="missing"):
        model.load_state({name: weight for name, weight in before.items() if name != "final_norm"})

    assert all(torch.equal(weight, before[name]) for name, weight in model.state().items())


@pytest.mark.parametrize("damaged", [DESCRIPTION_FILE, WEIGHTS_FILE])
def test_damaged_folder_is_refused_in_words(model: TinyModel, tmp_path: Path, damaged: str) -> None:
    save_tiny(model, tmp_path)
    (tmp_path / damaged).write_bytes((tmp_path / damaged).read_bytes()[:20])

    with pytest.raises(EngineError, match="holds no"):
        load_tiny(tmp_path)


def test_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    save_tiny(TinyModel(TinyShape(width=16, layers=1, heads=2, max_length=8, vocab_size=50)), tmp_path)

    with pytest.raises(EngineError, match="50 tokens"):
        load_tiny(tmp_path)
