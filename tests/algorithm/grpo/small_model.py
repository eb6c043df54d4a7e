"""A model small enough to be checked by hand: what a learner needs of a `CausalModel`, in 64 bits."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class SmallModel(nn.Module):
    """Predicts from the mean of all tokens so far; padding and what comes later have no part in it."""

    name = "small"
    vocab_size = 11
    max_length = 64
    end_ids = frozenset([10])

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype) * 0.5)

        self.embedding, self.inner, self.outer = weight(self.vocab_size, 8), weight(8, 8), weight(self.vocab_size, 8)
        self.modes: list[bool] = []

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def logits(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        return self.hidden(ids, attention_lengths, selected) @ self.outer.T

    def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        embedded = self.embedding[ids]
        counts = torch.arange(1, ids.shape[1] + 1, dtype=self.dtype)[None, :, None]
        hidden = (embedded.cumsum(1) / counts + embedded) @ self.inner
        return hidden[selected].tanh()

    def head(self) -> Tensor:
        return self.outer

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.detach()) for name, weight in self.named_parameters())

    def adapters(self) -> None:
        return None

    def state(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.named_parameters()}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self.named_parameters()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.load_state_dict(dict(tensors))

    def train_mode(self, enabled: bool, *, dropout: bool = True) -> None:
        self.modes.append(enabled)
