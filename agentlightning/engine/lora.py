"""Which small matrices are trained instead of a large model's own weights."""

from dataclasses import dataclass

__all__ = ["LoraOptions"]


@dataclass(frozen=True)
class LoraOptions:
    """Adapters of low rank beside the weights of a Hugging Face model, as the package peft makes them."""

    rank: int = 16
    alpha: float = 32.0
    """The adapters' part is scaled by alpha / rank."""
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get adapters."""
