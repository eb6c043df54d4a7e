"""How examples are gone through, checked when it is said."""

from dataclasses import dataclass

from agentlightning.errors import ConfigurationError

__all__ = ["FittingSettings"]


@dataclass(frozen=True, kw_only=True)
class FittingSettings:
    """How often and in which portions examples are gone through."""

    epochs: int = 3
    batch_size: int = 32
    """Sequences of one step of the optimiser."""
    patience: int | None = None
    """End after so many epochs in a row without a lower held-out loss; None makes all epochs."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1.")
