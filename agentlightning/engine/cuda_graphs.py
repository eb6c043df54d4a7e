"""Fewer and faster starts of kernels: passes through a model whose shapes return, captured as CUDA graphs.

A step of a small model is some hundred kernels that each take a few microseconds, and starting them from Python takes
ten times as long as running them; a graph starts all of them at once. A shape is captured when it returns, so that one
that occurs once costs nothing more. A model that cannot be captured runs as it would without graphs.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["CudaGraphs", "fuse_norms"]

logger = logging.getLogger(__name__)

MOST_GRAPHS: Final = 128
"""With more, all are forgotten; each holds some memory of the driver."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: Tensor


class CudaGraphs:
    """Runs functions of one tensor of integers; on a device without graphs, just runs them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_enabled = device.type == "cuda"
        self._pool: Any = None
        """Of memory, for all graphs: they never run at the same time."""
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, _Captured] = {}

    def run(self, key: Hashable, inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of `compute`; it is overwritten by the next run.

        Args:
            key: Names everything that `compute` depends on beside its inputs, and their number.
            inputs: On the CPU.
            compute: Must not wait for the device.
        """
        if not self.is_enabled:
            return compute(inputs.to(self.device))
        found = self._captured.get(key)
        if found is None:
            if key not in self._seen:
                self._seen.add(key)
                return compute(inputs.to(self.device))
            found = self._capture(key, inputs, compute)
            if found is None:
                return compute(inputs.to(self.device))
        found.inputs.copy_(inputs)
        found.graph.replay()
        return found.output

    def forget(self) -> None:
        """Forget all graphs, because the memory that they refer to is not valid any more."""
        self._captured.clear()
        self._pool = None  # it ends with the last graph of it

    def _capture(self, key: Hashable, inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> _Captured | None:
        if len(self._captured) >= MOST_GRAPHS:
            self.forget()
        fixed = inputs.to(self.device)
        try:
            beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch has not annotated it
            beside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(beside):  # libraries set up what they need, which must not happen in a capture
                compute(fixed)
            torch.cuda.current_stream(self.device).wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = compute(fixed)
        except RuntimeError as error:
            logger.warning("The model cannot be captured as a CUDA graph, so sampling is slower: %s", error)
            self.is_enabled = False
            self.forget()
            return None
        captured = self._captured[key] = _Captured(graph, fixed, output)
        return captured


def fuse_norms(network: nn.Module) -> None:
    """Put torch's RMSNorm, which is one kernel, in the place of those that compute the same with seven."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                fused = _fused(child)
                if fused is not None:
                    setattr(parent, name, fused)


def _fused(norm: nn.Module) -> nn.RMSNorm | None:
    """The same norm with the same weight; None if it computes something else: some add 1 to their weight."""
    epsilon, weight = getattr(norm, "variance_epsilon", getattr(norm, "eps", None)), getattr(norm, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    fused = nn.RMSNorm(weight.shape[0], eps=epsilon, device=weight.device, dtype=weight.dtype)
    fused.weight = weight
    probe = torch.linspace(-2, 3, 2 * weight.shape[0], device=weight.device, dtype=weight.dtype).view(2, -1)
    with torch.no_grad():
        expected, found = norm(probe), fused(probe)
    tolerance = 2 * torch.finfo(weight.dtype).eps * expected.abs().max()
    return fused if bool((expected - found).abs().max() <= tolerance) else None
