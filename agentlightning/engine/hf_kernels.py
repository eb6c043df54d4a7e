"""Faster ways through a model of transformers: its attention, and fewer and faster starts of kernels.

**Packed rows** lie end to end in one sequence: each token sees its own row, and no padding is computed. On a GPU in 16
bits it is the flash attention for rows of several lengths that comes with torch. Elsewhere the rows are attended to one
after the other, which computes the same. A mask would do so too, and would cost the square of all tokens in memory and
time. transformers hands the ends of the rows through its layers under the names that its own flash attention has for
them.

**Grouped heads** share keys and values. Where there is a mask, transformers copies these for every head, which takes a
third of a step of sampling; here the heads of a group are the queries of one head.

**CUDA graphs** start all kernels of a pass at once. A step of a small model is some hundred kernels that each take a
few microseconds, and starting them from Python takes ten times as long as running them. A shape is captured when it
returns, so that one that occurs once costs nothing more. A model that cannot be captured runs as it would without.
"""

import importlib
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentlightning.utils.json_values import JsonObject

logger = logging.getLogger(__name__)

PACKED: Final = "agentlightning_packed"
GROUPED: Final = "agentlightning_grouped"
_ENDS: Final = "cu_seq_lens_q"
_LONGEST: Final = "max_length_q"


def register_packed() -> None:
    """Make packed rows known to transformers, whose models choose their attention by name."""
    transformers: Any = importlib.import_module("transformers")
    transformers.AttentionInterface.register(PACKED, attend)


def use_groups(network: Any) -> None:
    """Have a model that uses torch's attention sample without copies of its keys; older transformers cannot."""
    transformers: Any = importlib.import_module("transformers")
    masks = getattr(transformers, "AttentionMaskInterface", None)
    if masks is not None and network.config._attn_implementation == "sdpa":
        transformers.AttentionInterface.register(GROUPED, attend_in_groups)
        masks.register(GROUPED, masks()["sdpa"])
        network.set_attn_implementation(GROUPED)


def row_arguments(lengths: Sequence[int], device: torch.device) -> JsonObject:
    """What a model of transformers is called with beside the ids of rows of these lengths, end to end."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    longest = max(lengths)
    return {
        "position_ids": positions[None].to(device),
        _ENDS: ends,
        "cu_seq_lens_k": ends,
        _LONGEST: longest,
        "max_length_k": longest,
    }


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside rows, of tensors [1, heads, tokens, width]; what is found is [1, tokens, heads, width].

    Calls that name no rows are those of whole sequences, and go to torch's own attention.
    """
    ends = options.get(_ENDS)
    if ends is None:
        return _attend_plainly(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    if options.get("softcap") is not None:
        raise ValueError("Attention with a soft cap is not computed in packed rows.")
    query, key, value = (_autocast(one) for one in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        flat = [one[0].transpose(0, 1) for one in (query, key, value)]
        longest = options[_LONGEST]
        attended = torch.ops.aten._flash_attention_forward(
            *flat, ends, ends, longest, longest, dropout, is_causal=True, return_debug_mask=False, scale=scaling
        )[0]
        return attended[None], None
    counts = ends.diff().tolist()
    is_grouped = query.shape[1] != key.shape[1]
    parts = [
        functional.scaled_dot_product_attention(
            own_query, own_key, own_value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        for own_query, own_key, own_value in zip(
            *(torch.split(one, counts, dim=2) for one in (query, key, value)), strict=True
        )
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def attend_in_groups(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one token a row [rows, heads, 1, width] to the keys of fewer heads; anything else as torch's own."""
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    is_plain = options.get("softcap") is None and options.get("position_bias") is None
    if tokens > 1 or groups == heads or not is_plain:
        return _attend_plainly(module, query, key, value, attention_mask, **options)
    found = functional.scaled_dot_product_attention(
        query.reshape(rows, groups, heads // groups, width),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return found.reshape(rows, 1, heads, -1), None


def _attend_plainly(*tensors: object, **options: object) -> tuple[Tensor, None]:
    found: tuple[Tensor, None] = importlib.import_module("transformers").AttentionInterface()["sdpa"](
        *tensors, **options
    )
    return found


def _autocast(tensor: Tensor) -> Tensor:
    """As torch does for its own attention, but not for the one that is called here."""
    kind = tensor.device.type
    is_changed = torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32
    return tensor.to(torch.get_autocast_dtype(kind)) if is_changed else tensor


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
        if len(self._captured) >= 128:  # each holds some memory of the driver
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
