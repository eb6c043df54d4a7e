"""The copy of a model's weights in 16 bits that a learner computes with, and that its engine gets.

It is rounded by chance when the weights have changed, so once for a step of the optimiser, however often they are
multiplied in it. A pass through the model finds the copy in place of the exact weights. The gradients that the copy
gets are those of the exact weights, and are added up there, in 32 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from agentlightning.engine.weights import WeightsBlock, rounded_parts


class RoundedCopy:
    """Of one model, whose parameters stay the same objects."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        """Take the memory.

        Args:
            network: All of its weights are rounded.
            dtype: Of products. Weights that are not multiplied keep theirs, with values that this one can hold.
        """
        self.dtype = dtype
        self._exact = dict(network.named_parameters())
        shapes = {name: tuple(exact.shape) for name, exact in self._exact.items()}
        self._block = WeightsBlock(shapes, dtype, next(network.parameters()).device)
        names = {exact: name for name, exact in self._exact.items()}
        self._places: list[tuple[dict[str, Parameter | None], str, Parameter, Parameter]] = []
        """Where modules have their weights: the exact one, and the rounded one."""
        self._widened: dict[str, Tensor] = {}
        """Those that are not multiplied."""
        for module in network.modules():
            for key, exact in module._parameters.items():
                if exact is not None:
                    memory = self._block.tensors[names[exact]]
                    if not isinstance(module, nn.Linear):
                        memory = self._widened.setdefault(names[exact], torch.empty_like(exact))
                    rounded = Parameter(memory, requires_grad=exact.requires_grad)
                    if rounded.requires_grad:
                        hook = partial(_add_gradient, exact)
                        rounded.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # not annotated
                    self._places.append((module._parameters, key, exact, rounded))
        self._rounded_from: object = None
        """The chance and the state of the exact weights."""

    def rounded(self, chance: str) -> WeightsBlock:
        """The copy in its own dtype; made anew if the weights have changed since, or the chance is another.

        Args:
            chance: Without the names of the weights.
        """
        # An optimiser may write past torch's count of changes; a learner gives each step its own chance.
        state = chance, [(exact.data_ptr(), exact._version) for exact in self._exact.values()]
        if state != self._rounded_from:
            self._rounded_from = None
            self._block.fill(rounded_parts(self._exact.items(), self.dtype, chance))
            if self._widened:
                torch._foreach_copy_(
                    list(self._widened.values()), [self._block.tensors[name] for name in self._widened]
                )
            self._rounded_from = state
        return self._block

    @contextmanager
    def in_use(self, chance: str) -> Iterator[None]:
        """The model computes with the copy, and the exact weights get its gradients."""
        self.rounded(chance)
        for parameters, key, _, rounded in self._places:
            parameters[key] = rounded
        try:
            yield
        finally:
            for parameters, key, exact, _ in self._places:
                parameters[key] = exact


def _add_gradient(exact: Parameter, rounded: Tensor) -> None:
    """Give a gradient to the exact weight, as soon as it is there: the copy keeps none."""
    gradient, rounded.grad = rounded.grad, None
    assert gradient is not None
    exact.grad = gradient.to(exact.dtype) if exact.grad is None else exact.grad.add_(gradient)
