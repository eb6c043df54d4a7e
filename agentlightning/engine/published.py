"""The weights of a model under training, in the form that an engine takes them.

Training keeps 32 bits of every weight, and most engines sample with 16. A step of learning is often smaller than half
the distance of two neighbours among the numbers of 16 bits: rounded to the nearer one, the published weights stand
still while the learner's move. So a number goes to one of its two neighbours by chance, the likelier the nearer it is,
which makes the mean right. Chance follows from the seed, the version and the name of the weight: whoever reads a
version on the same kind of device, and a run that is resumed, finds the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from agentlightning.engine.lora import AdapterWeights
    from agentlightning.engine.model import CausalModel

__all__ = ["PublishedWeights", "round_by_chance"]

_PIECE: Final = 1 << 22
"""Numbers that are rounded at once: the memory for it does not grow with the tensor."""
_EXPONENT: Final = 0x7F800000
"""The bits of a 32-bit number that stand for its power of two."""
_FULL_BITS: Final = 32


class PublishedWeights:
    """The weights of this moment; read them before the next update."""

    def __init__(self, model: CausalModel, *, seed: int, version: int = 0) -> None:
        """Nothing is computed before it is read.

        Args:
            seed: Of the rounding.
            version: Of the weights; another one is rounded by another chance.
        """
        self._model = model
        self._chance = f"{seed}/{version}"

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._model.device

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors, by their names."""
        return self._model.state_shapes()

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in the checkpoint, on the learner's device, one after the other.

        A weight that `dtype` cannot hold exactly is rounded by chance. Adapters are merged in 32 bits before that.
        Weights that are tied have one name. What is yielded may be the learner's own memory.
        """
        for name, tensor in self._model.weights():
            yield name, round_by_chance(tensor, dtype, seed=f"{self._chance}/{name}")

    def adapters(self) -> AdapterWeights | None:
        """The adapters alone, for an engine that serves them beside the base; None where the weights are trained."""
        return self._model.adapters()


def round_by_chance(tensor: Tensor, dtype: torch.dtype, *, seed: str) -> Tensor:
    """Cast, so that each number becomes one of its two neighbours in `dtype` and is kept in the mean.

    Numbers that `dtype` holds stay what they are, as do infinities and what is not a number. Nothing between the two
    largest neighbours becomes infinite; what is beyond the range of `dtype` does, as in any cast.
    """
    if tensor.dtype == dtype or torch.finfo(dtype).bits >= _FULL_BITS:
        return tensor.detach().to(dtype)
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    chance = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "big"))
    rounded = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    pieces = torch.split(tensor.detach().float().reshape(-1), _PIECE)
    for piece, place in zip(pieces, torch.split(rounded.view(-1), _PIECE), strict=True):
        place.copy_(_rounded(piece, torch.finfo(dtype), chance))
    return rounded


def _rounded(exact: Tensor, target: torch.finfo, chance: torch.Generator) -> Tensor:
    """In 32 bits, but on the grid of the target."""
    steps = (exact.view(torch.int32) & _EXPONENT).view(torch.float32)
    steps.mul_(target.eps).clamp_(min=target.smallest_normal * target.eps)  # to the next number, at each number
    scaled = exact / steps
    lower = scaled.floor()
    draws = torch.rand(exact.shape, generator=chance, device=exact.device)
    lower += draws < scaled.sub_(lower)
    rounded = lower.mul_(steps).clamp_(target.min, target.max)
    size = exact.abs()
    return torch.where((size > 0) & (size < _end_of_range(target)), rounded, exact)


def _end_of_range(target: torch.finfo) -> float:
    """What would come after the largest number; infinite where 32 bits cannot tell it."""
    end = math.ldexp(1.0, math.frexp(target.max)[1])
    return end if end <= torch.finfo(torch.float32).max else math.inf
