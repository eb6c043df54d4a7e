"""Weights in GPU memory that a trainer shares with an engine on the same GPU, described in a file that holds no code.

The trainer copies every weight into one block, writes where each lies into a small JSON file, and names that file to
the engine in place of one with the weights themselves. The block is made and shared once, and filled anew for every
version: the engine has copied one version before it says so. torch passes such memory between processes as pickles,
which can run code; here the handles are plain numbers and bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, NonNegativeInt, ValidationError
from torch import Tensor

from agentlightning.errors import InvalidRequest

__all__ = ["DESCRIPTION_SUFFIX", "SharedBlock", "SharedReader", "gpu_of"]

DESCRIPTION_SUFFIX: Final = ".shared.json"
_ALIGNMENT: Final = 256
"""Bytes; where a weight begins, so that any number may lie there."""


class _Description(BaseModel):
    """Where the weights lie, as the file says."""

    gpu: str
    dtype: Literal["float32", "float16", "bfloat16"]
    handle: list[int | bool | str]
    """What torch needs to open the block; bytes as base64."""
    places: dict[str, tuple[NonNegativeInt, tuple[NonNegativeInt, ...]]]
    """Offset in bytes and shape of every weight."""


class SharedBlock:
    """The trainer's side."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory; torch.OutOfMemoryError where there is not enough.

        Args:
            shapes: Of all weights, by name.
            dtype: That all of them have.
            device: A GPU.
        """
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for name, shape in shapes.items():
            self._places[name] = (end, shape)
            size = torch.Size(shape).numel() * dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.dtype = dtype
        self._block = torch.empty(end, dtype=torch.uint8, device=device)
        shared = self._block.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # not annotated
        self._handle = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in shared]

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights; returns when they are there."""
        for name, tensor in tensors:
            offset, shape = self._places[name]
            _part(self._block, offset, shape, self.dtype).copy_(tensor)
        torch.cuda.synchronize(self._block.device)

    def describe(self, path: Path) -> None:
        """Write the file that the engine reads."""
        described = _Description(
            gpu=str(gpu_of(self._block.device)),
            dtype=_name(self.dtype),
            handle=self._handle,
            places=self._places,
        )
        path.write_text(described.model_dump_json())


class SharedReader:
    """The engine's side; it keeps the last block open, since opening one takes longer than copying it."""

    def __init__(self) -> None:
        self._handle: list[int | bool | str] = []
        self._block: Tensor | None = None

    def read(self, path: Path, device: torch.device) -> dict[str, Tensor]:
        """The weights that a file describes, in the shared memory itself: copy them before the trainer goes on."""
        try:
            found = _Description.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise InvalidRequest(f"The file '{path}' does not describe shared weights: {error}") from error
        own = gpu_of(device)
        if found.gpu != own:
            raise InvalidRequest(f"The weights lie on the GPU '{found.gpu}', and this engine is on '{own}'.")
        try:
            if self._block is None or found.handle != self._handle:
                self._block, self._handle = _opened(found.handle, device), found.handle
            dtype = getattr(torch, found.dtype)
            return {name: _part(self._block, offset, shape, dtype) for name, (offset, shape) in found.places.items()}
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidRequest(f"The shared memory that '{path}' describes cannot be read: {error}") from error


def gpu_of(device: torch.device) -> str | None:
    """What tells the GPU from all others, in every process; None for another kind of device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _part(block: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return block[offset : offset + size].view(dtype).view(shape)


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


def _opened(handle: list[int | bool | str], device: torch.device) -> Tensor:
    _, *rest = [base64.b64decode(one) if isinstance(one, str) else one for one in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *rest)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
