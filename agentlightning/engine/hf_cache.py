"""A cache of keys and values in numbered slots, as the models of transformers use one.

Each slot is at a position of its own, which the caches of transformers do not know. A model only asks its cache to take
the new keys and values of a layer and to give those to attend to, so that is all there is here. All layers of a shape
lie in one block of memory, so that slots are copied in one operation. It grows by doubling, and nothing else moves it,
so that a captured CUDA graph may refer to it. One slot more than there are sequences takes what padding writes.

Where passes through the model are captured as graphs, rows and tokens are padded to few sizes, so that the same shapes
return.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import Self

FEWEST_TOKENS: Final = 32
GRAPHED_TOKENS: Final = 4096
"""Of a pass, padding included; in larger ones starting the kernels does not count."""
READ_STEP: Final = 64
"""Without graphs, attention reads up to a multiple of this, so that the sizes of its operations rarely change."""


@dataclass(frozen=True)
class CachePass:
    """Where one pass through the model writes and what it reads."""

    slots: Tensor
    """[rows, tokens]"""
    positions: Tensor
    """[rows, tokens]"""
    read: "Tensor | int | None"
    """The slots that are attended to, one for each row, or how many of the first; None attends to the pass alone."""
    length: int = 0
    """Positions of these slots that are attended to."""


class SlotCache:
    """Keys and values of the sequences under way; what a model of transformers takes for its `past_key_values`."""

    is_compileable = False

    def __init__(self, slots: int, length: int, *, layers: int) -> None:
        self.slots = slots
        self.length = length
        self.layers = layers
        """That the model has."""
        self.moves = 0
        """How often the memory was moved to grow."""
        self._room = (0, 0)
        """Slots and positions for which there is memory."""
        self._blocks: dict[tuple[int, int], Tensor] = {}
        """By heads and head width [2 * layers, slots + 1, heads, length, head width]: keys, and then values."""
        self._pass: CachePass | None = None

    @property
    def spare_slot(self) -> int:
        """Takes what padding writes."""
        return self._room[0]

    def make_room(self, slots: int, length: int) -> None:
        """Have memory for so many slots of so many positions."""
        have_slots, have_length = self._room
        if slots <= have_slots and length <= have_length:
            return
        room = (
            _doubled(slots, have_slots or 8, self.slots),
            _doubled(length, have_length or 256, self.length),
        )
        for shape, old in self._blocks.items():
            new = self._blocks[shape] = self._block(old, shape, room)
            new[:, :have_slots, :, :have_length] = old[:, :have_slots]
        self._room = room
        self.moves += 1

    def begin(self, one: CachePass) -> None:
        """Say what the next pass through the model writes and reads."""
        self._pass = one

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first positions of slots over others; all are read before any is written."""
        for block in self._blocks.values():
            block[:, targets, :, :length] = block[:, sources, :, :length]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *rest: object, **more: object
    ) -> tuple[Tensor, Tensor]:
        """Take the new keys and values of a layer [rows, heads, tokens, head width]; give those to attend to."""
        now = self._pass
        assert now is not None
        given = []
        for number, new in ((layer_idx, keys), (layer_idx + self.layers, values)):
            shape = (new.shape[1], new.shape[3])
            block = self._blocks.get(shape)
            if block is None:
                block = self._blocks[shape] = self._block(new, shape, self._room)
            block[number][now.slots, :, now.positions] = new.transpose(1, 2)
            given.append(block[number])
        if now.read is None:
            return keys, values
        if isinstance(now.read, int):
            return given[0][: now.read, :, : now.length], given[1][: now.read, :, : now.length]
        return given[0][now.read, :, : now.length], given[1][now.read, :, : now.length]

    def _block(self, like: Tensor, shape: tuple[int, int], room: tuple[int, int]) -> Tensor:
        return like.new_zeros(2 * self.layers, room[0] + 1, shape[0], room[1], shape[1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return int(getattr(query_length, "shape", [query_length])[0]), 0


def _doubled(needed: int, have: int, most: int) -> int:
    while have < needed:
        have *= 2
    return min(have, most)


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
    size = _power_of_two(longest, 128) if is_graphed else -(-longest // READ_STEP) * READ_STEP
    return min(size, cache.length)


def _power_of_two(least: int, fewest: int) -> int:
    return max(fewest, 1 << (least - 1).bit_length())


def _near_power_of_two(least: int) -> int:
    """The next power of two, or three quarters of it where these are enough."""
    size = _power_of_two(least, 1)
    three_quarters = size * 3 // 4
    return three_quarters if size >= 32 and three_quarters >= least else size
