"""A cache of keys and values in numbered slots, as the models of transformers use one.

Each slot is at a position of its own, which the caches of transformers do not know. A model only asks its cache to take
the new keys and values of a layer and to give those to attend to, so that is all there is here. All layers of a shape
lie in one block of memory, so that slots are copied in one operation. It grows by doubling, and nothing else moves it,
so that a captured CUDA graph may refer to it. One slot more than there are sequences takes what padding writes.
"""

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

__all__ = ["CachePass", "SlotCache"]

FIRST_SLOTS: Final = 8
FIRST_LENGTH: Final = 256


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

    # ------------------------------------------------------------------ what the engine does

    def make_room(self, slots: int, length: int) -> None:
        """Have memory for so many slots of so many positions."""
        have_slots, have_length = self._room
        if slots <= have_slots and length <= have_length:
            return
        room = (
            _doubled(slots, have_slots or FIRST_SLOTS, self.slots),
            _doubled(length, have_length or FIRST_LENGTH, self.length),
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

    # ------------------------------------------------------------------ what a model asks

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
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
