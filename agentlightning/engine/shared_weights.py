"""Weights in GPU memory that a trainer shares with an engine on the same GPU, described in a file that holds no code.

The trainer copies every weight into one block, writes where each lies into a small JSON file, and names that file to
the engine in place of one with the weights themselves. The block is made and shared once, and filled anew for every
version: the engine has copied one version before it says so. torch passes such memory between processes as pickles,
which can run code; here the handles are plain numbers and bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from agentlightning.errors import InvalidRequest

__all__ = ["DESCRIPTION_SUFFIX", "SharedBlock", "SharedReader", "gpu_of"]

DESCRIPTION_SUFFIX: Final = ".shared.json"
_ALIGNMENT: Final = 256
"""Bytes; where a weight begins, so that any number may lie there."""


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
        self._handle = _plain(shared)

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights; returns when they are there."""
        for name, tensor in tensors:
            offset, shape = self._places[name]
            _part(self._block, offset, shape, self.dtype).copy_(tensor)
        torch.cuda.synchronize(self._block.device)

    def describe(self, path: Path) -> None:
        """Write the file that the engine reads."""
        gpu = gpu_of(self._block.device)
        places = {name: [offset, list(shape)] for name, (offset, shape) in self._places.items()}
        name = str(self.dtype).removeprefix("torch.")
        path.write_text(json.dumps({"gpu": gpu, "dtype": name, "handle": self._handle, "places": places}))


class SharedReader:
    """The engine's side; it keeps the last block open, since opening one takes longer than copying it."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._block: Tensor | None = None

    def read(self, path: Path, device: torch.device) -> dict[str, Tensor]:
        """The weights that a file describes, in the shared memory itself: copy them before the trainer goes on."""
        try:
            found = json.loads(path.read_text())
            dtype, places = getattr(torch, found["dtype"]), found["places"]
            handle, gpu = found["handle"], found["gpu"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"The file '{path}' does not describe shared weights: {error!r}") from error
        own = gpu_of(device)
        if own is None or gpu != own:
            raise InvalidRequest(f"The weights lie on the GPU '{gpu}', and this engine is on '{own}'.")
        if self._block is None or handle != self._handle:
            self._block, self._handle = _opened(handle, device), handle
        return {name: _part(self._block, offset, tuple(shape), dtype) for name, (offset, shape) in places.items()}


def gpu_of(device: torch.device) -> str | None:
    """What tells the GPU from all others, in every process; None for another kind of device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _part(block: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return block[offset : offset + size].view(dtype).view(shape)


def _plain(handle: tuple[Any, ...]) -> list[Any]:
    """Bytes as text."""
    return [{"bytes": base64.b64encode(one).decode()} if isinstance(one, bytes) else one for one in handle]


def _opened(handle: list[Any], device: torch.device) -> Tensor:
    _, *rest = [base64.b64decode(one["bytes"]) if isinstance(one, dict) else one for one in handle]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *rest)
    except RuntimeError as error:
        raise InvalidRequest(f"The shared memory with the weights cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
