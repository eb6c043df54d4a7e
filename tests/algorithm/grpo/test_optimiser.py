"""The optimiser: step by step what torch's own is, without what comes with that."""

import subprocess
import sys

import pytest
import torch
from torch.nn import Parameter

from agentlightning.algorithm.grpo.optimiser import AdamW
from agentlightning.errors import TrainingError

OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}
RATES = (1e-2, 5e-3, 0.0, 2e-2, 1e-2)


def some_weights(seed: int = 0) -> dict[str, Parameter]:
    source = torch.Generator().manual_seed(seed)
    shapes = {"wide": (5, 3), "long": (40,), "one": (1,)}
    return {name: Parameter(torch.randn(shape, generator=source)) for name, shape in shapes.items()}


def an_optimiser(weights: dict[str, Parameter]) -> AdamW:
    return AdamW(weights, epsilon=1e-8, **OPTIONS)  # type: ignore[arg-type]


def give_gradients(weights: dict[str, Parameter], step: int) -> None:
    source = torch.Generator().manual_seed(100 + step)
    for name, weight in weights.items():
        has_none = name == "one" and step % 2 == 0  # it falls behind the others
        weight.grad = None if has_none else torch.randn(weight.shape, generator=source)


def test_its_steps_are_those_of_torch() -> None:
    weights, theirs = some_weights(), some_weights()
    ours = an_optimiser(weights)
    torchs = torch.optim.AdamW(theirs.values(), eps=1e-8, fused=True, **OPTIONS)  # type: ignore[arg-type]

    for step, rate in enumerate(RATES):
        give_gradients(weights, step)
        give_gradients(theirs, step)
        ours.step(rate)
        torchs.param_groups[0]["lr"] = rate
        torchs.step()

    for name, weight in weights.items():
        assert torch.equal(weight, theirs[name]), name


def test_another_goes_on_from_its_state() -> None:
    weights = some_weights()
    first = an_optimiser(weights)
    for step in range(3):
        give_gradients(weights, step)
        first.step(1e-2)
    state = first.state()
    copies = {name: Parameter(weight.detach().clone()) for name, weight in weights.items()}
    second = an_optimiser(copies)
    second.load_state(state)

    for one in (first, second):
        give_gradients(one.weights, 7)
        one.step(1e-2)

    assert all(torch.equal(copies[name], weight) for name, weight in weights.items())
    assert not torch.equal(state["mean"]["wide"], first.state()["mean"]["wide"])  # it was a copy


@pytest.mark.parametrize("other", [{"tall": (5, 3)}, {"wide": (3, 5)}], ids=["name", "shape"])
def test_the_state_of_other_weights_is_refused(other: dict[str, tuple[int, ...]]) -> None:
    weights = some_weights()
    give_gradients(weights, 1)
    first = an_optimiser(weights)
    first.step(1e-2)
    stranger = an_optimiser({name: Parameter(torch.zeros(shape)) for name, shape in other.items()})

    with pytest.raises(TrainingError, match="other weights"):
        stranger.load_state(first.state())

    assert stranger.state()["steps"] == {}


def test_gradients_are_forgotten() -> None:
    weights = some_weights()
    give_gradients(weights, 1)

    an_optimiser(weights).forget_gradients()

    assert all(weight.grad is None for weight in weights.values())


def test_learning_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys; from agentlightning.algorithm.grpo.learner import Learner;"
        "from agentlightning.algorithm.grpo.samples import Sample;"
        "from agentlightning.engine.tiny.model import TinyModel;"
        "Learner(TinyModel()).update([Sample([1, 20, 8], [0, 1, 1], [None, -1.0, -1.0], 1.0, 0, 'g', 'r')]);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
