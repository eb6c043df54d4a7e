"""Weights on their way from a trainer to an engine: a safetensors file, checked before a model takes it over.

A file is written beside its place, and moved there when it is whole, so a reader finds all of it or nothing.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from typing_extensions import Self

from agentlightning.errors import EngineError, InvalidRequest
from agentlightning.utils.disk import bring_to_disk

if TYPE_CHECKING:
    from agentlightning.engine.model import CausalModel

__all__ = ["WeightsPlan", "copy_weights", "read_weights", "write_weights"]

_NAMED: Final = 3
"""Names that an error lists, of those that do not fit."""


@dataclass(frozen=True)
class WeightsPlan:
    """Which tensors a model takes, and of which shapes."""

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: "CausalModel") -> Self:
        return cls(model.state_shapes())

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """InvalidRequest, unless these are the tensors of the model, whole and finite."""
        missing, unknown = self.shapes.keys() - tensors.keys(), tensors.keys() - self.shapes.keys()
        if missing or unknown:
            words = [f"{_some(names)} {what}" for names, what in ((missing, "missing"), (unknown, "unknown")) if names]
            raise InvalidRequest(f"The weights are not those of this model: {' and '.join(words)}.")
        for name, shape in self.shapes.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shape:
                raise InvalidRequest(f"The weights '{name}' have the shape {list(tensor.shape)}, not {list(shape)}.")
            if tensor.is_floating_point() and not math.isfinite(tensor.sum(dtype=torch.float32).item()):
                raise InvalidRequest(f"The weights '{name}' hold values that are not finite numbers.")


def _some(names: "set[str]") -> str:
    listed = ", ".join(f"'{name}'" for name in sorted(names)[:_NAMED])
    rest = len(names) - _NAMED
    return f"{listed} and {rest} more are" if rest > 0 else f"{listed} {'is' if len(names) == 1 else 'are'}"


def copy_weights(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], *, model: str) -> None:
    """Copy tensors over a model's own; EngineError, and nothing changed, when names or shapes are not the same.

    Args:
        model: What it is called.
    """
    if own.keys() != tensors.keys():
        odd = ", ".join(sorted(own.keys() ^ tensors.keys())[:_NAMED])
        raise EngineError(f"The weights are not those of model '{model}': missing or unknown are {odd}.")
    for name, weight in own.items():
        if tensors[name].shape != weight.shape:
            raise EngineError(
                f"Weight '{name}' has the shape {tuple(tensors[name].shape)}; model '{model}' needs "
                f"{tuple(weight.shape)}."
            )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name])


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file that is there whole or not at all; tensors may share memory and lie on any device.

    EngineError where the disk does not take it.
    """
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in _apart(tensors).items()}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        safetensors.torch.save_file(plain, beside, metadata=dict(metadata) if metadata else None)
        bring_to_disk(beside)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, (OSError, safetensors.SafetensorError)):
            raise EngineError(f"The weights cannot be written to '{path}': {error}") from error
        raise


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, with copies of those that share memory with one before, which the format does not know."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.detach().clone() if memory in seen else tensor
        seen.add(memory)
    return apart


def read_weights(path: Path, device: torch.device | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU by default; EngineError where it is not there, cut short, or something else."""
    try:
        return safetensors.torch.load_file(path, device="cpu" if device is None else str(device))
    except FileNotFoundError:
        raise InvalidRequest(f"There is no file of weights at '{path}'.") from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InvalidRequest(f"The file of weights '{path}' cannot be read: {error}") from error
