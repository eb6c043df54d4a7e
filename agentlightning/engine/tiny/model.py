"""The tiny model's transformer: pre-norm blocks, rotary positions, tied embeddings, 32-bit numbers.

A step of so small a model costs the calls into torch rather than the arithmetic, so the step is written with few of
them: one product makes queries, keys and values, one complex product turns queries and keys by their position (and
leaves values as they are), one assignment writes keys and values into the cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentlightning.engine.tiny.tokenizer import END, VOCABULARY_SIZE
from agentlightning.engine.weights import copy_weights

ROTARY_BASE: Final = 10_000.0
NORM_EPSILON: Final = 1e-5
CACHE_STRIDE: Final = 16
"""Attention reads the cache up to a multiple of this, so that its buffers keep their sizes for some steps."""


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a tiny model."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    max_length: int = 1024
    vocab_size: int = VOCABULARY_SIZE

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class TinyCache:
    """Keys and values of the sequences under way."""

    layers: list[Tensor]
    """For every layer [2, slots, heads, length, head width]."""
    slots: Tensor
    """0, 1, 2 …"""
    columns: Tensor
    """0, 1, 2 … up to the length."""


class TinyBlock(nn.Module):
    """The weights of one layer; `TinyModel` computes with them."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        width, hidden = shape.width, 4 * shape.width
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.attention_in = nn.Parameter(torch.empty(3 * width, width))
        self.attention_out = nn.Parameter(torch.empty(width, width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.hidden_in = nn.Parameter(torch.empty(hidden, width))
        self.hidden_out = nn.Parameter(torch.empty(width, hidden))


class TinyModel(nn.Module):
    """A decoder-only transformer; a `CausalModel`."""

    shares_prefixes = False

    def __init__(self, shape: TinyShape | None = None, *, name: str = "tiny") -> None:
        super().__init__()
        self.shape = shape or TinyShape()
        self.name = name
        self.vocab_size = self.shape.vocab_size
        self.max_length = self.shape.max_length
        self.end_ids = frozenset([END])
        self.embedding = nn.Parameter(torch.empty(self.shape.vocab_size, self.shape.width))
        self.blocks = nn.ModuleList(TinyBlock(self.shape) for _ in range(self.shape.layers))
        self.final_norm = nn.Parameter(torch.ones(self.shape.width))
        self.register_buffer("turns", _turns(self.shape), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Random weights, from torch's default generator."""
        residual_scale = 1 / math.sqrt(2 * self.shape.layers)
        nn.init.normal_(self.embedding, 0, 0.02)
        for block in self._layers():
            for weight in (block.attention_in, block.attention_out, block.hidden_in, block.hidden_out):
                nn.init.normal_(weight, 0, 1 / math.sqrt(weight.shape[1]))
            block.attention_out.data *= residual_scale
            block.hidden_out.data *= residual_scale

    def _layers(self) -> list[TinyBlock]:
        return [cast("TinyBlock", block) for block in self.blocks]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def new_cache(self, slots: int, length: int) -> TinyCache:
        size = (2, slots, self.shape.heads, length, self.shape.head_width)
        layers = [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in range(self.shape.layers)]
        return TinyCache(
            layers, torch.arange(slots, device=self.device), torch.arange(length, device=self.device)[None]
        )

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: TinyCache, slots: Tensor, starts: Tensor | None = None
    ) -> Tensor:
        ids, lengths, slots = (given.to(self.device) for given in (ids, lengths, slots))
        rows, length = ids.shape
        hidden = functional.embedding(ids, self.embedding)
        for block, stored in zip(self._layers(), cache.layers, strict=True):
            queries, keys, values = self._project(block, hidden, self._turns_until(length))
            stored[0, slots, :, :length] = keys
            stored[1, slots, :, :length] = values
            hidden = self._finish(block, hidden, _attend(queries, keys, values))
        last = hidden[torch.arange(rows, device=ids.device), lengths - 1]
        return self._predict(last)

    def decode(self, tokens: Tensor, positions: Tensor, cache: TinyCache, n: int) -> Tensor:
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        heads, head_width = self.shape.heads, self.shape.head_width
        capacity = cache.columns.shape[1]
        read = min(capacity, (int(positions.max()) // CACHE_STRIDE + 1) * CACHE_STRIDE)
        unseen = torch.zeros((n, 1, read), device=self.device, dtype=self.dtype)
        unseen.masked_fill_(cache.columns[:, :read] > positions[:, None, None], -math.inf)
        unseen = unseen.repeat_interleave(heads, dim=0)
        slots = cache.slots[:n]
        turns = self._turns()[positions]
        hidden = functional.embedding(tokens, self.embedding)
        for block, stored in zip(self._layers(), cache.layers, strict=True):
            projected = functional.linear(self._norm(hidden, block.attention_norm), block.attention_in)
            pairs = torch.view_as_complex(projected.view(n, 3, heads, head_width // 2, 2))
            turned = torch.view_as_real(pairs * turns).view(n, 3, heads, head_width)
            stored[:, slots, :, positions] = turned[:, 1:]
            keys, values = stored[:, :n].flatten(1, 2)[:, :, :read].unbind()
            queries = turned[:, 0].reshape(n * heads, 1, head_width)
            weights = torch.baddbmm(unseen, queries, keys.transpose(1, 2), alpha=head_width**-0.5).softmax(-1)
            hidden = self._finish(block, hidden, torch.bmm(weights, values).view(n, -1))
        return self._predict(hidden)

    def move(self, cache: TinyCache, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for stored in cache.layers:
            stored[:, targets, :, :length] = stored[:, sources, :, :length]

    def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        """The states at the selected positions; padding on the right is hidden by causality alone."""
        hidden = functional.embedding(ids, self.embedding)
        turns = self._turns_until(ids.shape[1])
        for block in self._layers():
            hidden = self._finish(block, hidden, _attend(*self._project(block, hidden, turns)))
        return self._norm(hidden[selected], self.final_norm)

    def head(self) -> Tensor:
        return self.embedding

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.named_parameters())

    def adapters(self) -> None:
        """It has none."""

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.weights()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        copy_weights(tensors, dict(self.named_parameters()))

    def train_mode(self, enabled: bool, *, dropout: bool = True) -> None:
        self.train(enabled)

    def _turns(self) -> Tensor:
        return cast("Tensor", self.turns)

    def _turns_until(self, length: int) -> Tensor:
        """For whole rows: [3, 1, length, head width / 2]."""
        return self._turns()[:length].permute(1, 2, 0, 3)

    def _project(self, block: TinyBlock, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of whole rows, each [rows, heads, length, head width]."""
        rows, length, _ = hidden.shape
        heads, head_width = self.shape.heads, self.shape.head_width
        projected = functional.linear(self._norm(hidden, block.attention_norm), block.attention_in)
        pairs = torch.view_as_complex(projected.view(rows, length, 3, heads, head_width // 2, 2))
        turned = torch.view_as_real(pairs.permute(0, 2, 3, 1, 4) * turns).flatten(-2)
        queries, keys, values = turned.unbind(1)
        return queries, keys, values

    def _finish(self, block: TinyBlock, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer after attention."""
        hidden = hidden + functional.linear(attended, block.attention_out)
        inner = functional.linear(self._norm(hidden, block.hidden_norm), block.hidden_in)
        return hidden + functional.linear(functional.gelu(inner), block.hidden_out)

    def _predict(self, hidden: Tensor) -> Tensor:
        return functional.linear(self._norm(hidden, self.final_norm), self.embedding)

    def _norm(self, hidden: Tensor, gain: Tensor) -> Tensor:
        return functional.layer_norm(hidden, (self.shape.width,), gain, None, NORM_EPSILON)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of whole rows: [rows, length, width]."""
    attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return attended.transpose(1, 2).flatten(2)


def _turns(shape: TinyShape) -> Tensor:
    """Rotations by position [length, 3, 1, head width / 2]: for queries, for keys, and none for values."""
    steps = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(shape.max_length, dtype=torch.float32), ROTARY_BASE**-steps)
    rotation = torch.polar(torch.ones_like(angles), angles)
    return torch.stack([rotation, rotation, torch.ones_like(rotation)], dim=1)[:, :, None]
