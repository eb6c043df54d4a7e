"""What the engine and the trainer need of a model, whatever family it is of.

One object serves both: the engine calls `new_cache`, `prefill`, `decode` and `move` without gradients and with tensors
on the CPU, the trainer calls `hidden` and `head`. Rows of a batch are padded on the right; a position that is padding
is never looked at.

`LoraOptions` says which small matrices are trained instead of a large model's own weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from torch import Tensor, device, dtype
    from torch.nn import Parameter


@suggests_arguments
@dataclass(frozen=True)
class LoraOptions:
    """Adapters of low rank beside the weights of a Hugging Face model, as the package peft makes them."""

    rank: int = 16
    alpha: float = 32.0
    """The adapters' part is scaled by alpha / rank."""
    dropout: float = 0.0
    """Of supervised fine-tuning. GRPO leaves it out: ratios to probabilities of an engine, which knows none, would be
    noise."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get adapters."""


@dataclass(frozen=True)
class AdapterWeights:
    """Adapters as peft saves them, for an engine that serves them beside the base model."""

    tensors: dict[str, Tensor]
    """What `adapter_model.safetensors` holds, in 32 bits, on the learner's device; the learner's own memory."""
    config: JsonObject
    """What `adapter_config.json` holds."""


# ---------------------------------------------------------------------- models


SMALL_MODEL_PARAMETERS: Final = 5_000_000


class CausalModel(Protocol):
    """A decoder of tokens with a cache of keys and values in numbered slots."""

    name: str
    vocab_size: int
    max_length: int
    """Tokens of the longest sequence, prompt and answer together."""
    end_ids: frozenset[int]
    """Tokens that end a message."""
    shares_prefixes: bool
    """Whether `prefill` takes `starts`."""

    @property
    def device(self) -> device: ...

    @property
    def dtype(self) -> dtype: ...
    def new_cache(self, slots: int, length: int) -> Any:
        """Room for `slots` sequences of at most `length` tokens."""
        ...

    def prefill(self, ids: Tensor, lengths: Tensor, cache: Any, slots: Tensor, starts: Tensor | None = None) -> Tensor:
        """Read prompts [B, T] of `lengths` [B] into `slots` [B]; the logits [B, vocab] after each one's last token.

        With `starts` [B], so many positions of each slot hold what comes before.
        """
        ...

    def decode(self, tokens: Tensor, positions: Tensor, cache: Any, n: int) -> Tensor:
        """Read one token at its position in each of the slots 0 to n-1; the logits after it [n, vocab]."""
        ...

    def move(self, cache: Any, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of slots over others; all are read before any is written."""
        ...

    def hidden(self, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
        """The states [k, width] after those k positions of `ids` [B, T] that `selected` [B, T] marks; differentiable.

        The logits [k, vocab] themselves where there is no head. A model that packs rows takes them end to end
        too: `ids` [1, T] of several rows of `attention_lengths`.
        """
        ...

    def head(self) -> Tensor | None:
        """What `hidden` is multiplied with, [vocab, width], so that nobody must hold all logits; None if it is more."""
        ...

    def trainable(self) -> dict[str, Parameter]:
        """What an optimiser may change, by name; with LoRA only the adapters."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in the checkpoint, on the model's device, one after the other, none rounded.

        Adapters are merged in 32 bits. What is not merged is the model's own memory.
        """
        ...

    def adapters(self) -> AdapterWeights | None:
        """The adapters alone, as peft saves them; None for a model without."""
        ...

    def state(self) -> dict[str, Tensor]:
        """A copy of `weights()` of this moment, on the CPU: exact, for checkpoints and exported models."""
        ...

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `weights()`, by the same names, without making them."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over another's weights; EngineError, and nothing changed, when names or shapes do not fit."""
        ...

    def train_mode(self, enabled: bool, *, dropout: bool = True) -> None:
        """Switch what differs between training and sampling; `dropout` says whether it is used in training."""
        ...


def is_small(model: CausalModel) -> bool:
    """Whether an operation of it is so short that handing it to another thread costs more than it saves."""
    if model.device.type != "cpu":
        return False
    return sum(map(math.prod, model.state_shapes().values())) <= SMALL_MODEL_PARAMETERS


def logits_of(model: CausalModel, ids: Tensor, attention_lengths: Tensor, selected: Tensor) -> Tensor:
    """The logits [k, vocab] after the selected positions."""
    hidden, head = model.hidden(ids, attention_lengths, selected), model.head()
    return hidden if head is None else hidden @ head.T
