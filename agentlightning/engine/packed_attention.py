"""Attention over rows that lie end to end in one sequence: each token sees its own row, and no padding is computed.

On a GPU in 16 bits it is the flash attention for rows of several lengths that comes with torch. Elsewhere the rows are
attended to one after the other, which computes the same. A mask would do so too, and would cost the square of all
tokens in memory and time. transformers hands the ends of the rows through its layers under the names that its own
flash attention has for them.
"""

import importlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["NAME", "attend", "register", "row_arguments"]

NAME: Final = "agentlightning_packed"
_ENDS: Final = "cu_seq_lens_q"
_LONGEST: Final = "max_length_q"


def register() -> None:
    """Make it known to transformers, whose models choose their attention by name."""
    transformers: Any = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, attend)


def row_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
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
        plain = importlib.import_module("transformers").AttentionInterface()["sdpa"]
        found: tuple[Tensor, None] = plain(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
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


def _autocast(tensor: Tensor) -> Tensor:
    """As torch does for its own attention, but not for the one that is called here."""
    kind = tensor.device.type
    is_changed = torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32
    return tensor.to(torch.get_autocast_dtype(kind)) if is_changed else tensor
