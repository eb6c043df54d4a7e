"""The optimiser: torch's own, with state by the names of weights and moments in 8 bits."""

import sys
from importlib.util import find_spec

import pytest
import torch
from torch.nn import Parameter

from agentlightning.algorithm.grpo.optimiser import AdamW
from agentlightning.errors import ConfigurationError, TrainingError

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="8 bits need bitsandbytes")
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


def test_a_state_with_codes_of_8_bits_as_earlier_releases_wrote_it_is_refused() -> None:
    codes, scales = torch.zeros((4, 256), dtype=torch.uint8), torch.zeros((4, 1))
    groups = {"mean": codes, "square": codes, "mean_scales": scales, "square_scales": scales}
    state = {"steps": {"wide": 3}, **{group: {"wide": moment} for group, moment in groups.items()}}

    with pytest.raises(TrainingError, match="another optimiser"):
        an_optimiser({"wide": Parameter(torch.zeros(4, 256))}).load_state(state)


# ---------------------------------------------------------------------- moments in 8 bits


def large_weights(seed: int = 0) -> dict[str, Parameter]:
    """One is kept in 8 bits, in blocks of which the last is not full, and one is too small for that."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: Parameter(torch.randn(shape, generator=source))
        for name, shape in {"large": (70, 61), "small": (30,)}.items()
    }


def after_steps(optimiser: AdamW, steps: range) -> AdamW:
    for step in steps:
        source = torch.Generator().manual_seed(100 + step)
        for weight in optimiser.weights.values():
            spread = torch.logspace(-4, 0, weight.numel()).view(weight.shape)
            weight.grad = (torch.randn(weight.shape, generator=source) + 0.3) * spread
        optimiser.step(1e-2)
    return optimiser


def adamw(weights: dict[str, Parameter], *, in_8_bits: bool) -> AdamW:
    return AdamW(weights, epsilon=1e-8, in_8_bits=in_8_bits, **OPTIONS)  # type: ignore[arg-type]


def test_without_bitsandbytes_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)

    with pytest.raises(ConfigurationError, match=r"needs the package bitsandbytes: run `pip install .*bitsandbytes"):
        adamw(large_weights(), in_8_bits=True)


@needs_bitsandbytes
def test_the_steps_with_8_bits_are_near_those_with_32() -> None:
    short, long = (adamw(large_weights(), in_8_bits=in_8_bits) for in_8_bits in (True, False))
    began = large_weights()["large"]

    after_steps(short, range(20)), after_steps(long, range(20))

    moved = long.weights["large"] - began
    error = short.weights["large"] - long.weights["large"]
    assert error.norm() < 0.1 * moved.norm()


@needs_bitsandbytes
def test_large_weights_have_their_moments_in_8_bits() -> None:
    state = after_steps(adamw(large_weights(), in_8_bits=True), range(2)).state()

    assert {name: moment.dtype for name, moment in state["state1"].items()} == {
        "large": torch.uint8,
        "small": torch.float32,
    }
    assert state["absmax1"]["large"].numel() == 17  # blocks of 256


@needs_bitsandbytes
def test_8_bits_go_on_from_their_own_state_without_a_difference() -> None:
    first = after_steps(adamw(large_weights(), in_8_bits=True), range(3))
    copies = {name: Parameter(weight.detach().clone()) for name, weight in first.weights.items()}
    second = adamw(copies, in_8_bits=True)
    second.load_state(first.state())

    after_steps(first, range(3, 6)), after_steps(second, range(3, 6))

    assert all(torch.equal(copies[name], weight) for name, weight in first.weights.items())


@needs_bitsandbytes
@pytest.mark.parametrize("in_8_bits", [False, True], ids=["into 32", "into 8"])
def test_a_state_of_the_other_kind_is_refused(in_8_bits: bool) -> None:
    first = after_steps(adamw(large_weights(), in_8_bits=not in_8_bits), range(2))
    second = after_steps(adamw(large_weights(), in_8_bits=in_8_bits), range(1))

    with pytest.raises(TrainingError, match="another optimiser"):
        second.load_state(first.state())

    assert second.state()["steps"] == {"large": 1, "small": 1}
