"""AdamW over named weights, with torch's own kernels.

torch's class for it imports torch's compiler when it is made, which takes a second and is not needed here. Its state is
kept by the names of the weights, so that the state of another model is noticed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from agentlightning.errors import TrainingError

__all__ = ["AdamW"]

_MOMENTS = ("mean", "square")


class AdamW:
    """Makes steps with the gradients that the weights hold; equal to `torch.optim.AdamW`."""

    def __init__(
        self,
        weights: Mapping[str, Parameter],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
    ) -> None:
        self.weights = dict(weights)
        self.betas = betas
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self._steps: dict[str, Tensor] = {}
        self._moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in _MOMENTS}
        """Of the gradients and of their squares, by weight; a weight has none before its first gradient."""

    def step(self, learning_rate: float) -> None:
        """Change the weights that have gradients."""
        gradients = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        for name in gradients:
            self._begin(name)
        mean, square = ([self._moments[kind][name] for name in gradients] for kind in _MOMENTS)
        with torch.no_grad():
            adamw(
                [self.weights[name] for name in gradients],
                list(gradients.values()),
                mean,
                square,
                [],
                [self._steps[name] for name in gradients],
                fused=all(weight.device.type in ("cpu", "cuda") for weight in self.weights.values()),
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
        return {
            "steps": {name: int(steps.item()) for name, steps in self._steps.items()},
            **{kind: {name: _copied(one) for name, one in found.items()} for kind, found in self._moments.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another left off; TrainingError, and nothing changed, if it had other weights."""
        steps: Mapping[str, int] = state["steps"]
        for name in steps:
            own = self.weights.get(name)
            if own is None or any(state[kind][name].shape != own.shape for kind in _MOMENTS):
                raise TrainingError(f"The state of the optimiser is of other weights, such as '{name}'.")
        self._steps = {}
        self._moments = {kind: {} for kind in _MOMENTS}
        for name, made in steps.items():
            self._begin(name)
            self._steps[name].fill_(made)
            for kind in _MOMENTS:
                self._moments[kind][name].copy_(state[kind][name])

    def _begin(self, name: str) -> None:
        if name in self._steps:
            return
        weight = self.weights[name]
        self._steps[name] = torch.zeros((), dtype=torch.float32, device=weight.device)
        for kind in _MOMENTS:
            self._moments[kind][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
