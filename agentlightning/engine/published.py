"""The weights of a model under training, in the form that an engine takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from agentlightning.engine.model import CausalModel

__all__ = ["PublishedWeights"]


class PublishedWeights:
    """The weights of this moment; read them before the next update."""

    def __init__(self, model: CausalModel, *, seed: int) -> None:
        self._model = model
        self._seed = seed

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in the checkpoint, on the learner's device, one after the other.

        A weight that `dtype` cannot hold exactly is rounded by chance, so that steps below its resolution are not lost
        in the mean. Adapters are merged in 32 bits before that.
        """
        for name, tensor in self._model.state().items():
            yield name, tensor.to(dtype)
