"""The weights of a model: written to a file, checked before a model takes them over, and rounded for an engine.

A file is written beside its place, and moved there when it is whole, so a reader finds all of it or nothing.

Training keeps 32 bits of every weight, and most engines sample with 16. A step of learning is often smaller than half
the distance of two neighbours among the numbers of 16 bits: rounded to the nearer one, the published weights stand
still while the learner's move. So a number goes to one of its two neighbours by chance, the likelier the nearer it is,
which makes the mean right. Chance follows from the seed, the version and the name of the weight: whoever reads a
version on the same kind of device, and a run that is resumed, finds the same numbers.

A learner in 16 bits computes with the numbers that are published. `RoundedCopy` holds them: it rounds when the weights
have changed, so once for a step of the optimiser, however often they are multiplied in it. A pass through the model
finds the copy in place of the exact weights. The gradients that the copy gets are those of the exact weights, and are
added up there, in 32 bits.

On one GPU, weights travel in memory that the trainer shares with the engine: one block, which is the copy of 16 bits
that the learner computes with where there is one. The trainer writes where each weight lies into a small JSON file, and
names that file to the engine in place of one with the weights themselves. The block is made and shared once, and filled
anew for every version: the engine has copied one version before it says so. torch passes such memory between processes
as pickles, which can run code; here the handles are plain numbers and bytes.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, NonNegativeInt, ValidationError
from torch import Tensor, nn
from torch.nn import Parameter

from agentlightning.errors import EngineError, InvalidRequest
from agentlightning.utils.private_files import bring_to_disk

if TYPE_CHECKING:
    from agentlightning.engine.model import AdapterWeights, CausalModel

DESCRIPTION_SUFFIX: Final = ".shared.json"
_ALIGNMENT: Final = 256
"""Bytes; where a weight begins in shared memory, so that any number may lie there."""
_NAMED: Final = 3
"""Names that an error lists, of those that do not fit."""
_PIECE: Final = 1 << 23
"""Numbers that are rounded at once: the memory for it does not grow with the model, nor the starts of kernels much."""


def check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """InvalidRequest, unless the tensors have these names and shapes."""
    differing = [("missing", shapes.keys() - tensors.keys()), ("unknown", tensors.keys() - shapes.keys())]
    if problems := [f"{_listed(names)} {problem}" for problem, names in differing if names]:
        raise InvalidRequest(f"The weights are not those of this model: {' and '.join(problems)}.")
    for name, shape in shapes.items():
        if list(tensors[name].shape) != list(shape):
            raise InvalidRequest(f"The weights '{name}' have the shape {list(tensors[name].shape)}, not {list(shape)}.")


def _listed(names: set[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in sorted(names)[:_NAMED])
    rest = len(names) - _NAMED
    return f"{listed} and {rest} more are" if rest > 0 else f"{listed} {'is' if len(names) == 1 else 'are'}"


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """InvalidRequest for values that are not finite numbers."""
    sums = {name: tensor.sum(dtype=torch.float32) for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name, total in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True):  # a GPU is waited for once
        if not math.isfinite(total):
            raise InvalidRequest(f"The weights '{name}' hold values that are not finite numbers.")


def copy_weights(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Copy tensors over a model's own; InvalidRequest, and nothing changed, when names or shapes are not the same."""
    check_shapes(tensors, {name: weight.shape for name, weight in own.items()})
    with torch.no_grad():
        torch._foreach_copy_(list(own.values()), [tensors[name] for name in own])


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file that is there whole or not at all; tensors may share memory and lie on any device.

    EngineError where the disk does not take it.
    """
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        alone = tensor.detach().clone() if memory in seen else tensor.detach()  # the format knows no shared memory
        seen.add(memory)
        plain[name] = alone.to("cpu").contiguous()
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


def read_weights(path: Path, device: torch.device | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU by default; EngineError where it is not there, cut short, or something else."""
    try:
        return safetensors.torch.load_file(path, device="cpu" if device is None else str(device))
    except FileNotFoundError:
        raise InvalidRequest(f"There is no file of weights at '{path}'.") from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InvalidRequest(f"The file of weights '{path}' cannot be read: {error}") from error


class PublishedWeights:
    """The weights of this moment; read them before the next update."""

    def __init__(self, model: CausalModel, *, seed: int, version: int = 0, copy: RoundedCopy | None = None) -> None:
        """Nothing is computed before it is read.

        Args:
            seed: Of the rounding.
            version: Of the weights; another one is rounded by another chance.
            copy: What the learner computes with, if it rounds the weights by this chance itself.
        """
        self._model, self._copy = model, copy
        self._chance = f"{seed}/{version}"

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._model.device

    def block(self, dtype: torch.dtype, own: WeightsBlock | None = None) -> WeightsBlock:
        """All weights: the copy that the learner computes with or, without one in `dtype`, a block that is filled.

        Args:
            own: What was returned before; a new one otherwise.
        """
        if self._copy is not None and self._copy.dtype == dtype:
            return self._copy.rounded(self._chance)
        block = own or WeightsBlock(self._model.state_shapes(), dtype, self._model.device)
        block.fill(self.parts(dtype))
        return block

    def parts(self, dtype: torch.dtype) -> Iterator[Mapping[str, Tensor]]:
        """Every weight under its name in the checkpoint, on the learner's device, some of them at a time.

        A weight that `dtype` cannot hold exactly is rounded by chance. Adapters are merged in 32 bits before that.
        Weights that are tied have one name. What is yielded may be the learner's own memory.
        """
        if self._copy is not None and self._copy.dtype == dtype:
            return iter([self._copy.rounded(self._chance).tensors])
        return rounded_parts(self._model.weights(), dtype, self._chance)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All of `parts`, one after the other."""
        for part in self.parts(dtype):
            yield from part.items()

    def adapters(self) -> AdapterWeights | None:
        """The adapters alone, for an engine that serves them beside the base; None where the weights are trained."""
        return self._model.adapters()


def rounded_parts(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, chance: str
) -> Iterator[dict[str, Tensor]]:
    """Tensors cast by `round_by_chance`, as many together as it rounds at once; the same ones always alike."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if part and sum(one.numel() for one in part.values()) + tensor.numel() > _PIECE:
            yield _rounded_part(part, dtype, chance)
            part = {}
        part[name] = tensor.detach()
    if part:
        yield _rounded_part(part, dtype, chance)


def _rounded_part(part: Mapping[str, Tensor], dtype: torch.dtype, chance: str) -> dict[str, Tensor]:
    flat = [tensor.reshape(-1) for tensor in part.values()]
    rounded = round_by_chance(torch.cat(flat) if len(flat) > 1 else flat[0], dtype, seed=f"{chance}/{next(iter(part))}")
    pieces = torch.split(rounded, [len(one) for one in flat])
    return {name: piece.view(part[name].shape) for name, piece in zip(part, pieces, strict=True)}


def round_by_chance(tensor: Tensor, dtype: torch.dtype, *, seed: str) -> Tensor:
    """Cast, so that each number becomes one of its two neighbours in `dtype` and is kept in the mean.

    Numbers that `dtype` holds stay what they are, as do infinities and what is not a number. Nothing between the two
    largest neighbours becomes infinite; what is beyond the range of `dtype` does, as in any cast.
    """
    if tensor.dtype == dtype or torch.finfo(dtype).bits >= 32:
        return tensor.detach().to(dtype)
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    chance = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "big"))
    rounded = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    pieces = torch.split(tensor.detach().float().reshape(-1), _PIECE)
    for piece, place in zip(pieces, torch.split(rounded.view(-1), _PIECE), strict=True):
        place.copy_(_rounded(piece, torch.finfo(dtype), chance))
    return rounded


def _rounded(exact: Tensor, target: torch.finfo, chance: torch.Generator) -> Tensor:
    """In 32 bits, but on the grid of the target."""
    # The bits of a 32-bit number that stand for its power of two.
    steps = (exact.view(torch.int32) & 0x7F800000).view(torch.float32)
    steps.mul_(target.eps).clamp_(min=target.smallest_normal * target.eps)  # to the next number, at each number
    scaled = exact / steps
    lower = scaled.floor()
    lower += torch.rand(exact.shape, generator=chance, device=exact.device) < scaled.sub_(lower)
    rounded = lower.mul_(steps).clamp_(target.min, target.max)
    # What would come after the largest number; infinite where 32 bits cannot hold it.
    end = math.ldexp(1.0, math.frexp(target.max)[1])
    limit = end if end <= torch.finfo(torch.float32).max else math.inf
    size = torch.abs(exact, out=scaled)
    return torch.where((size > 0) & (size < limit), rounded, exact, out=steps)


# ---------------------------------------------------------------------- shared GPU memory


class _Description(BaseModel):
    """Where the weights lie, as the file says."""

    gpu: str
    dtype: Literal["float32", "float16", "bfloat16"]
    handle: list[int | bool | str]
    """What torch needs to open the block; bytes as base64."""
    places: dict[str, tuple[NonNegativeInt, tuple[NonNegativeInt, ...]]]
    """Offset in bytes and shape of every weight."""


class WeightsBlock:
    """Memory for all weights of a model in one dtype, which on a GPU another process can map."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory; torch.OutOfMemoryError where there is not enough."""
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        end = 0
        for name, shape in shapes.items():
            self._places[name] = (end, shape)
            size = torch.Size(shape).numel() * dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.dtype = dtype
        self._block = torch.empty(end, dtype=torch.uint8, device=device)
        self.tensors = {name: _part(self._block, *place, dtype) for name, place in self._places.items()}
        """The weights, in this memory."""
        self._handle: list[int | bool | str] = []

    def fill(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Copy all weights, with few starts of kernels for each part."""
        for part in parts:
            torch._foreach_copy_([self.tensors[name] for name in part], list(part.values()))

    def describe(self, path: Path) -> None:
        """Write the file that the engine reads, when all that was written into the block is there."""
        if not self._handle:
            shared = self._block.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # not annotated
            self._handle = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in shared]
        torch.cuda.synchronize(self._block.device)
        described = _Description(
            gpu=str(gpu_of(self._block.device)),
            dtype=cast("Any", str(self.dtype).removeprefix("torch.")),
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


def _opened(handle: list[int | bool | str], device: torch.device) -> Tensor:
    _, *rest = [base64.b64decode(one) if isinstance(one, str) else one for one in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *rest)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


# ---------------------------------------------------------------------- what a learner computes with


class RoundedCopy:
    """All weights of one model in 16 bits; its parameters stay the same objects."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        """Take the memory.

        Args:
            network: All of its weights are rounded.
            dtype: Of products. Weights that are not multiplied keep theirs, with values that this one can hold.
        """
        self.dtype = dtype
        self._exact = dict(network.named_parameters())
        shapes = {name: tuple(exact.shape) for name, exact in self._exact.items()}
        self._block = WeightsBlock(shapes, dtype, next(network.parameters()).device)
        names = {exact: name for name, exact in self._exact.items()}
        self._places: list[tuple[dict[str, Parameter | None], str, Parameter, Parameter]] = []
        """Where modules have their weights: the exact one, and the rounded one."""
        self._widened: dict[str, Tensor] = {}
        """Those that are not multiplied."""
        places = [(module, key, exact) for module in network.modules() for key, exact in module._parameters.items()]
        for module, key, exact in places:
            if exact is None:
                continue
            memory = self._block.tensors[names[exact]]
            if not isinstance(module, nn.Linear):
                memory = self._widened.setdefault(names[exact], torch.empty_like(exact))
            rounded = Parameter(memory, requires_grad=exact.requires_grad)
            if rounded.requires_grad:
                rounded.register_post_accumulate_grad_hook(partial(_add_gradient, exact))  # type: ignore[no-untyped-call]
            self._places.append((module._parameters, key, exact, rounded))
        self._rounded_from: object = None
        """The chance and the state of the exact weights."""

    def rounded(self, chance: str) -> WeightsBlock:
        """The copy in its own dtype; made anew if the weights have changed since, or the chance is another.

        Args:
            chance: Without the names of the weights.
        """
        # An optimiser may write past torch's count of changes; a learner gives each step its own chance.
        state = chance, [(exact.data_ptr(), exact._version) for exact in self._exact.values()]
        if state != self._rounded_from:
            self._rounded_from = None
            self._block.fill(rounded_parts(self._exact.items(), self.dtype, chance))
            if self._widened:
                torch._foreach_copy_(
                    list(self._widened.values()), [self._block.tensors[name] for name in self._widened]
                )
            self._rounded_from = state
        return self._block

    @contextmanager
    def in_use(self, chance: str) -> Iterator[None]:
        """The model computes with the copy, and the exact weights get its gradients."""
        self.rounded(chance)
        for parameters, key, _, rounded in self._places:
            parameters[key] = rounded
        try:
            yield
        finally:
            for parameters, key, exact, _ in self._places:
                parameters[key] = exact


def _add_gradient(exact: Parameter, rounded: Tensor) -> None:
    """Give a gradient to the exact weight, as soon as it is there: the copy keeps none."""
    gradient, rounded.grad = rounded.grad, None
    assert gradient is not None
    exact.grad = gradient.to(exact.dtype) if exact.grad is None else exact.grad.add_(gradient)
