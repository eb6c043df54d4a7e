"""A cache of keys and values in numbered slots, as the models of transformers use one.

Each slot is at a position of its own, which the caches of transformers do not know. A model only asks its cache to take
the new keys and values of a layer and to give those to attend to, so that is all there is here: after a prompt was
read, these are the prompt's own; in a step, those of all active slots up to the longest. Memory grows with its use.
"""

from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["SlotCache"]

SLOT_STEP: Final = 8
LENGTH_STEP: Final = 256
READ_STEP: Final = 64
"""Attention reads up to a multiple of this, so that the shapes of its operations rarely change."""


class SlotCache:
    """Keys and values of the sequences under way; what a model of transformers takes for its `past_key_values`."""

    is_compileable = False

    def __init__(self, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self._layers: dict[int, list[Tensor]] = {}
        """By layer, keys and values [slots, heads, length, head width]."""
        self._target: Tensor | None = None
        self._positions: Tensor | None = None
        self._active = 0
        self._reads = 0

    # ------------------------------------------------------------------ what the engine says

    def reading(self, slots: Tensor) -> None:
        """Prompts are read next, into these slots."""
        self._target, self._positions = slots, None
        self._active = int(slots.max()) + 1

    def stepping(self, positions: Tensor, active: int) -> Tensor:
        """One token of each active slot is read next, at its position; the mask of what it attends to."""
        self._target, self._positions, self._active = torch.arange(active, device=positions.device), positions, active
        longest = int(positions.max()) + 1
        self._reads = min(-(-longest // READ_STEP) * READ_STEP, self.length)
        columns = torch.arange(self._reads, device=positions.device)
        return (columns <= positions[:, None])[:, None, None, :]

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self._layers.values():
            for stored in layer:
                stored[target, :, :length] = stored[source, :, :length]

    # ------------------------------------------------------------------ what a model asks

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Take the new keys and values of a layer [rows, heads, tokens, head width]; give those to attend to."""
        target, positions = self._target, self._positions
        assert target is not None
        if positions is None:
            length = keys.shape[2]
            for stored, new in zip(self._room(layer_idx, keys, values, length), (keys, values), strict=True):
                stored[target, :, :length] = new
            return keys, values
        given = []
        for stored, new in zip(self._room(layer_idx, keys, values, self._reads), (keys, values), strict=True):
            stored[target, :, positions] = new[:, :, 0]
            given.append(stored[: self._active, :, : self._reads])
        return given[0], given[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return int(getattr(query_length, "shape", [query_length])[0]), 0

    # ------------------------------------------------------------------ parts

    def _room(self, layer_idx: int, keys: Tensor, values: Tensor, length: int) -> list[Tensor]:
        """The memory of a layer, made larger if slots or positions are missing."""
        layer = self._layers.get(layer_idx)
        if layer is not None and layer[0].shape[0] >= self._active and layer[0].shape[2] >= length:
            return layer
        slots, room = self._active, length
        if layer is not None:
            slots, room = max(slots, layer[0].shape[0]), max(room, layer[0].shape[2])
        slots = min(-(-slots // SLOT_STEP) * SLOT_STEP, self.slots)
        room = min(-(-room // LENGTH_STEP) * LENGTH_STEP, self.length)
        larger = [new.new_zeros(slots, new.shape[1], room, new.shape[3]) for new in (keys, values)]
        for old, new in zip(layer or (), larger, strict=False):
            new[: old.shape[0], :, : old.shape[2]] = old
        self._layers[layer_idx] = larger
        return larger
