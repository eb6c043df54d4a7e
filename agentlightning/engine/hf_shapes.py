"""The shapes of passes through a model, and their inputs in one tensor.

Where passes are captured as graphs, rows and tokens are padded to few sizes, so that the same shapes return. What is
padding writes into the cache's spare slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import Self

from agentlightning.engine.hf_cache import SlotCache

__all__ = ["ReadShape", "StepShape"]

FEWEST_TOKENS: Final = 32
FEWEST_READS: Final = 128
GRAPHED_TOKENS: Final = 4096
"""Of a pass, padding included; in larger ones starting the kernels does not count."""
READ_STEP: Final = 64
"""Without graphs, attention reads up to a multiple of this, so that the sizes of its operations rarely change."""


@dataclass(frozen=True)
class ReadShape:
    """Of a pass that reads prompts."""

    rows: int
    tokens: int
    reads: int
    """Positions of the cache that are attended to; 0 if the prompts begin with this pass."""

    @classmethod
    def of(cls, ids: Tensor, starts: Tensor | None, cache: SlotCache, *, is_graphed: bool) -> Self:
        rows, tokens = ids.shape
        if is_graphed and _power_of_two(rows, 1) * _power_of_two(tokens, FEWEST_TOKENS) <= GRAPHED_TOKENS:
            rows, tokens = _power_of_two(rows, 1), min(_power_of_two(tokens, FEWEST_TOKENS), cache.length)
        if starts is None:
            return cls(rows, tokens, 0)
        longest = min(int(starts.max()) + ids.shape[1], cache.length)
        return cls(rows, tokens, _reads(longest, cache, is_graphed=is_graphed))

    @property
    def is_small(self) -> bool:
        """Whether it is worth a graph."""
        return self.rows * self.tokens <= GRAPHED_TOKENS

    def packed(self, ids: Tensor, lengths: Tensor, slots: Tensor, starts: Tensor | None, *, spare_slot: int) -> Tensor:
        """All inputs, with rows and tokens of padding."""
        rows, tokens = ids.shape
        padded = ids.new_zeros(self.rows, self.tokens)
        padded[:rows, :tokens] = ids
        missing = self.rows - rows
        return torch.cat(
            [
                padded.flatten(),
                lengths,
                lengths.new_ones(missing),
                slots,
                slots.new_full((missing,), spare_slot),
                torch.zeros_like(lengths) if starts is None else starts,
                lengths.new_zeros(missing),
            ]
        )

    def parts(self, inputs: Tensor) -> Sequence[Tensor]:
        """Ids [rows, tokens], lengths, slots and starts."""
        sizes = [self.rows * self.tokens, self.rows, self.rows, self.rows]
        ids, *others = torch.split(inputs, sizes)
        return [ids.view(self.rows, self.tokens), *others]


@dataclass(frozen=True)
class StepShape:
    """Of a pass that reads one token in each of the first slots."""

    rows: int
    reads: int

    @classmethod
    def of(cls, positions: Tensor, cache: SlotCache, *, is_graphed: bool) -> Self:
        rows = len(positions)
        if is_graphed:
            rows = min(_near_power_of_two(rows), cache.slots)
        return cls(rows, _reads(int(positions.max()) + 1, cache, is_graphed=is_graphed))

    def packed(self, tokens: Tensor, positions: Tensor, *, spare_slot: int) -> Tensor:
        """Tokens, positions and slots, with rows of padding."""
        inputs = tokens.new_zeros(3, self.rows)
        count = len(tokens)
        inputs[0, :count], inputs[1, :count] = tokens, positions
        inputs[2] = torch.arange(self.rows)
        inputs[2, count:] = spare_slot
        return inputs


def _reads(longest: int, cache: SlotCache, *, is_graphed: bool) -> int:
    size = _power_of_two(longest, FEWEST_READS) if is_graphed else -(-longest // READ_STEP) * READ_STEP
    return min(size, cache.length)


def _power_of_two(least: int, fewest: int) -> int:
    return max(fewest, 1 << (least - 1).bit_length())


def _near_power_of_two(least: int) -> int:
    """The next power of two, or three quarters of it where these are enough."""
    size = _power_of_two(least, 1)
    three_quarters = size * 3 // 4
    return three_quarters if size >= 32 and three_quarters >= least else size
