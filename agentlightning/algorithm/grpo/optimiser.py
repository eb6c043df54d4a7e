"""AdamW over named weights, with torch's own kernels.

torch's class for it imports torch's compiler when it is made, which takes a second and is not needed here. Its state is
kept by the names of the weights, so that the state of another model is noticed. The moments of large weights may be
kept in 8 bits: they are read, changed and written back in slices, and the square roots of the second ones are kept,
whose range is half as wide.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from agentlightning.algorithm.grpo.quantised import Quantised
from agentlightning.errors import TrainingError

__all__ = ["SMALLEST_QUANTISED", "AdamW"]

SMALLEST_QUANTISED: Final = 4096
"""Numbers that a weight must have for its moments to be kept in 8 bits; norms and biases would save nothing."""
_MOMENTS: Final = ("mean", "square")
_SCALES: Final = "_scales"


class AdamW:
    """Makes steps with the gradients that the weights hold; in 32 bits, equal to `torch.optim.AdamW`."""

    def __init__(
        self,
        weights: Mapping[str, Parameter],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        in_8_bits: bool = False,
    ) -> None:
        self.weights = dict(weights)
        self.betas = betas
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self._in_8_bits = in_8_bits
        self._steps: dict[str, Tensor] = {}
        self._moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in _MOMENTS}
        """Of the gradients and of their squares, by weight; a weight has none before its first gradient."""
        self._quantised: dict[str, dict[str, Quantised]] = {kind: {} for kind in _MOMENTS}
        """The same for weights whose moments are in 8 bits; of squares, their roots."""

    def step(self, learning_rate: float) -> None:
        """Change the weights that have gradients."""
        gradients = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        for name in gradients:
            self._begin(name)
        whole = [name for name in gradients if name in self._moments["mean"]]
        with torch.no_grad():
            self._change(
                [self.weights[name] for name in whole],
                [gradients[name] for name in whole],
                ([self._moments["mean"][name] for name in whole], [self._moments["square"][name] for name in whole]),
                [self._steps[name] for name in whole],
                learning_rate,
            )
            for name, gradient in gradients.items():
                if name in self._quantised["mean"]:
                    self._step_in_slices(name, gradient, learning_rate)

    def _step_in_slices(self, name: str, gradient: Tensor, learning_rate: float) -> None:
        mean, root = (self._quantised[kind][name] for kind in _MOMENTS)
        weight, gradient = self.weights[name].detach().view(-1), gradient.reshape(-1)
        for part in mean.slices():
            first, second = mean.read(part), root.read(part).square_()
            steps = [self._steps[name].clone()]  # which the step counts up
            self._change([weight[part]], [gradient[part]], ([first], [second]), steps, learning_rate)
            mean.write(part, first)
            root.write(part, second.sqrt_())
        self._steps[name] += 1

    def _change(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: tuple[list[Tensor], list[Tensor]],
        steps: list[Tensor],
        learning_rate: float,
    ) -> None:
        adamw(
            weights,
            gradients,
            *moments,
            [],
            steps,
            fused=all(weight.device.type in ("cpu", "cuda") for weight in weights),
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            maximize=False,
        )

    def forget_gradients(self) -> None:
        """Free what the gradients take."""
        for weight in self.weights.values():
            weight.grad = None

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, beside the weights; a copy, on the CPU."""
        found: dict[str, Any] = {"steps": {name: int(steps.item()) for name, steps in self._steps.items()}}
        for kind in _MOMENTS:
            found[kind] = {name: _copied(moment) for name, moment in self._moments[kind].items()}
            quantised = self._quantised[kind]
            found[kind] |= {name: _copied(moment.codes) for name, moment in quantised.items()}
            found[kind + _SCALES] = {name: _copied(moment.scales) for name, moment in quantised.items()}
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another left off; TrainingError, and nothing changed, if it had other weights or moments."""
        steps: Mapping[str, int] = state["steps"]
        before = self._steps, self._moments, self._quantised
        self._steps = {}
        self._moments, self._quantised = {kind: {} for kind in _MOMENTS}, {kind: {} for kind in _MOMENTS}
        for name, made in steps.items():
            if name in self.weights:
                self._begin(name)
                self._steps[name].fill_(made)
        for kind, name in itertools.product(_MOMENTS, steps):
            targets = self._targets(kind, name)
            saved = [state[group][name] for group in (kind, kind + _SCALES) if name in state.get(group, ())]
            if [one.shape for one in saved] != [one.shape for one in targets]:
                self._steps, self._moments, self._quantised = before
                raise TrainingError(
                    f"The state of the optimiser is of other weights, such as '{name}', or of another optimiser."
                )
            for target, one in zip(targets, saved, strict=True):
                target.copy_(one)

    def _targets(self, kind: str, name: str) -> list[Tensor]:
        """Where the moment of a weight is kept; empty if there is no such weight."""
        if name in self._quantised[kind]:
            return [self._quantised[kind][name].codes, self._quantised[kind][name].scales]
        return [self._moments[kind][name]] if name in self._moments[kind] else []

    def _begin(self, name: str) -> None:
        if name in self._steps:
            return
        weight = self.weights[name]
        is_plain = weight.dtype == torch.float32 and weight.is_contiguous()
        is_quantised = self._in_8_bits and is_plain and weight.numel() >= SMALLEST_QUANTISED
        for kind in _MOMENTS:
            if is_quantised:
                zeros = Quantised(weight.numel(), is_signed=kind == "mean", device=weight.device)
                self._quantised[kind][name] = zeros
            else:
                self._moments[kind][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        self._steps[name] = torch.zeros((), dtype=torch.float32, device=weight.device)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
