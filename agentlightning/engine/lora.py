"""Which small matrices are trained instead of a large model's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentlightning.utils.json_values import JsonObject
from agentlightning.utils.spelling import suggests_arguments

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdapterWeights", "LoraOptions"]


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
