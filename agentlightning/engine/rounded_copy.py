"""The copy of a model's weights in 16 bits that a learner computes with, and that its engine gets.

It is rounded by chance when the weights have changed, so once for a step of the optimiser, however often they are
multiplied in it. A pass through the model finds the copy in place of the exact weights. The gradients that the copy
gets are those of the exact weights, which are rounded to no gradient of their own: they are added up there, in 32 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from agentlightning.engine.weights import WeightsBlock, rounded_parts


class RoundedCopy:
    """Of one model, whose parameters stay the same objects."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        """Take the memory.

        Args:
            network: Its adapters, if it has some, would be rounded as well.
            dtype: Of products. Weights that are not multiplied keep theirs, with values that this one can hold.
        """
        self.dtype = dtype
        self._exact = dict(network.named_parameters())
        shapes = {name: tuple(exact.shape) for name, exact in self._exact.items()}
        self._block = WeightsBlock(shapes, dtype, next(network.parameters()).device)
        names = {exact: name for name, exact in self._exact.items()}
        rounded: dict[tuple[Parameter, bool], Parameter] = {}
        self._places: list[tuple[dict[str, Parameter | None], str, Parameter, Parameter]] = []
        """Where modules have their weights: the exact one, and the rounded one."""
        for module in network.modules():
            is_product = isinstance(module, nn.Linear)
            for key, exact in module._parameters.items():
                if exact is None:
                    continue
                if (exact, is_product) not in rounded:
                    memory = self._block.tensors[names[exact]] if is_product else torch.empty_like(exact)
                    rounded[exact, is_product] = Parameter(memory, requires_grad=exact.requires_grad)
                self._places.append((module._parameters, key, exact, rounded[exact, is_product]))
        self._pairs = [(exact, one) for (exact, _), one in rounded.items()]
        self._wide = {names[exact]: one for (exact, is_product), one in rounded.items() if not is_product}
        """What is not multiplied."""
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
            with torch.no_grad():
                self._block.fill(rounded_parts(self._exact.items(), self.dtype, chance))
                if self._wide:
                    narrow = [self._block.tensors[name] for name in self._wide]
                    torch._foreach_copy_(list(self._wide.values()), narrow)
            self._rounded_from = state
        return self._block

    @contextmanager
    def in_use(self, chance: str) -> Iterator[None]:
        """The model computes with the copy; at the end, the exact weights have the gradients that it got."""
        self.rounded(chance)
        for parameters, key, _, rounded in self._places:
            parameters[key] = rounded
        try:
            yield
            self._pass_gradients_on()
        finally:
            for parameters, key, exact, rounded in self._places:
                parameters[key], rounded.grad = exact, None

    def _pass_gradients_on(self) -> None:
        first, further = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for exact, rounded in self._pairs:
            gradient = rounded.grad
            if gradient is None:
                continue
            if exact.grad is not None:
                further.append((exact.grad, gradient))
            elif gradient.dtype == exact.dtype:
                exact.grad = gradient
            else:
                exact.grad = torch.empty_like(exact)
                first.append((exact.grad, gradient))
        if first:
            torch._foreach_copy_([exact for exact, _ in first], [gradient for _, gradient in first])
        if further:
            torch._foreach_add_([exact for exact, _ in further], [gradient for _, gradient in further])
