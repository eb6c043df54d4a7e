"""Numbers in 8 bits each: a code into a table of 256 values, times the largest number of a block of 256.

The table is the dynamic one of bitsandbytes: half of its values are in the upper tenth of the range, a quarter in the
tenth below, and so on over seven powers of ten, so that small numbers beside large ones keep their size. It is written
with torch alone, since a package with kernels of its own is one more that must fit torch, CUDA and Python.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["BLOCK", "Quantised"]

BLOCK: Final = 256
"""Numbers that share one scale."""
DECADES: Final = 7
_SLICE_BLOCKS: Final = 1 << 15
"""Blocks that are in 32 bits at a time."""


class Quantised:
    """As many numbers as some tensor has, in its order; zeros at first."""

    def __init__(self, count: int, *, is_signed: bool, device: torch.device) -> None:
        """Make room.

        Args:
            count: How many numbers.
            is_signed: Numbers that cannot be negative have twice the precision, and none of them becomes 0, for
                something is divided by them.
            device: Where they are.
        """
        self.count = count
        blocks = -(-count // BLOCK)
        self.codes = torch.zeros((blocks, BLOCK), dtype=torch.uint8, device=device)
        self.scales = torch.zeros((blocks, 1), device=device)
        """The largest number of each block."""
        self._values = _table(is_signed).to(device)
        self._bounds = (self._values[1:] + self._values[:-1]) / 2
        self._least_code = 0 if is_signed else 1

    def slices(self) -> Iterator[slice]:
        """All numbers in parts, for `read` and `write`."""
        size = _SLICE_BLOCKS * BLOCK
        return (slice(start, min(start + size, self.count)) for start in range(0, self.count, size))

    def read(self, part: slice) -> Tensor:
        """A slice of the numbers, in 32 bits."""
        blocks = _blocks(part)
        values = self._values[self.codes[blocks].int()].mul_(self.scales[blocks])
        return values.view(-1)[: part.stop - part.start]

    def write(self, part: slice, values: Tensor) -> None:
        """Replace a slice of the numbers, each by the nearest that there is."""
        blocks = _blocks(part)
        rows = functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scales = rows.abs().amax(-1, keepdim=True)
        codes = torch.bucketize(rows / scales.clamp(min=torch.finfo(scales.dtype).tiny), self._bounds, out_int32=True)
        self.codes[blocks] = codes.clamp_(min=self._least_code).to(torch.uint8)
        self.scales[blocks] = scales


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _table(is_signed: bool) -> Tensor:
    """The 256 values, from the lowest to 1."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if is_signed else decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
        values += middles + ([-value for value in middles] if is_signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)
